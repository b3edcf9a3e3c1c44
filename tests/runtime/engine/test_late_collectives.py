"""With collectives that end as late as NCCL's may, and nothing ordered but by their `wait`, training has the same bits.

On one GPU, and on none: see `support/late_collectives.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.mesh.collectives import Done, Pending
from dsrun.runtime.mesh.loopback import LoopbackWorld
from support.devices import on_devices
from support.inside_engine import store_of
from support.late_collectives import LateWorld
from support.models import AdaptedBlock, TinyGPT
from support.threaded_ranks import Trained, assert_same_bits, train_in
from support.training import batches, config

CPU = torch.device("cpu")


class Skipping(TinyGPT):
    """Leaves out a block where a sample says so: other blocks on other ranks."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        left_out = int(tokens_BT[0, 0]) % (len(self.blocks) + 1)
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = block(x)
        return self.head(self.norm(x)) * self.scale


class Adapted(TinyGPT):
    """Trains the paths beside its frozen blocks."""

    def __init__(self) -> None:
        super().__init__(width=40)
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock(40, 4) for _ in range(3))


def tiny() -> TinyGPT:
    return TinyGPT(width=40)


RECOMPUTED = {"activation_checkpointing": {"policy": "every_block"}}
ONE_SLOT = {"stage3_prefetch_bucket_size": 0}
MANY_SLOTS = {"stage3_prefetch_bucket_size": 10**9}
SOME_STAY = {"stage3_param_persistence_threshold": 5_000}
FEW_LIVE = {"stage3_max_live_parameters": 20_000}
#: Acts in some step of each case.
CLIPPING = 0.2
#: Ranks, stage, model, keys of `zero_optimization`, accumulation steps, and the rest of the config.
CASES: dict[str, tuple[int, int, Callable[[], nn.Module], dict[str, Any], int, dict[str, Any]]] = {
    "stage 0": (3, 0, tiny, {}, 2, {"bf16": True}),
    "stage 1": (2, 1, tiny, {}, 2, {}),
    "stage 1, gradients in fp32": (
        3,
        1,
        tiny,
        {},
        2,
        {"bf16": True, "communication_data_type": "fp32", "prescale_gradients": True},
    ),
    "stage 2": (4, 2, tiny, {}, 2, {"bf16": True}),
    "stage 2, recomputed": (2, 2, tiny, {}, 1, RECOMPUTED),
    "stage 2, other blocks on other ranks": (3, 2, lambda: Skipping(width=40, layers=4), {}, 2, {}),
    "stage 3": (4, 3, tiny, {}, 2, {"bf16": True}),
    "stage 3, recomputed": (2, 3, tiny, {}, 2, RECOMPUTED),
    "stage 3, one slot": (2, 3, tiny, ONE_SLOT, 2, {"bf16": True, **RECOMPUTED}),
    "stage 3, many slots": (3, 3, lambda: TinyGPT(width=40, layers=4), MANY_SLOTS, 2, {}),
    "stage 3, few at once": (2, 3, lambda: TinyGPT(width=40, layers=4), FEW_LIVE, 1, {"bf16": True}),
    "stage 3, some stay": (3, 3, tiny, SOME_STAY, 2, {"bf16": True}),
    "stage 3, fp16": (2, 3, tiny, {}, 2, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "stage 3, frozen": (2, 3, Adapted, {}, 2, {"bf16": True}),
}


def settings_of(stage: int, zero: dict[str, Any], accumulation: int, options: dict[str, Any]) -> dict[str, Any]:
    settings = config(stage, micro=1, accumulation=accumulation, **options)
    settings["zero_optimization"] |= zero
    settings["gradient_clipping"] = CLIPPING
    return settings


def evaluates(engine: Any, noted: list[Tensor]) -> None:
    """A forward without a backward between steps: it gathers in an order of its own, and ahead of the next step."""
    with torch.no_grad():
        noted.append(engine(batches(99, samples=1)[0].to(engine.device)).clone())


def train(case: str, world: LoopbackWorld, device: torch.device, *, poison: bool = False) -> list[Trained]:
    _, stage, model, zero, accumulation, options = CASES[case]

    def between(engine: Any, noted: list[Tensor]) -> None:
        if poison and stage == 3:
            store_of(engine).poison = True
        evaluates(engine, noted)

    settings = settings_of(stage, zero, accumulation, options)
    return train_in(world, settings, device=device, model=model, between=between)


#: Alone a rank is the calling thread, on its stream, as it is in a process a rank.
ALONE = ("stage 0", "stage 1, gradients in fp32", "stage 2", "stage 3, one slot", "stage 3, some stay", "stage 3")
#: On a GPU: of each stage one, and of stage 3 what gathers otherwise.
ON_GPU = (
    ("stage 0", 3),
    ("stage 1, gradients in fp32", 3),
    ("stage 2, other blocks on other ranks", 3),
    ("stage 3", 4),
    ("stage 3, one slot", 2),
    ("stage 3, frozen", 2),
    ("stage 3, some stay", 1),
)
#: On the CPU left out by default.
SOAK = (
    ("stage 2, recomputed", 2),
    ("stage 3, recomputed", 2),
    ("stage 2", 1),
    ("stage 3", 1),
    ("stage 3, some stay", 1),
)


@pytest.mark.gpu_seconds(1)
@pytest.mark.parametrize(
    ("device", "case", "size"),
    on_devices(
        [*((case, CASES[case][0]) for case in CASES), *((case, 1) for case in ALONE)],
        on_gpu=ON_GPU,
        soak=SOAK,
        stands="the same stage on other ranks, and with one slot what is recomputed",
    ),
    indirect=["device"],
)
def test_collectives_that_end_late_change_no_bit(device: torch.device, case: str, size: int) -> None:
    late = LateWorld(size, device=device)
    found = train(case, late, device, poison=True)
    assert_same_bits(found, train(case, LoopbackWorld(size), device))
    assert max(found[0].norms) > CLIPPING
    # What was gathered ahead for a step that did not come.
    assert all(name.startswith("all_gather of unit") for name in late.unwaited)


# That it can fail -----------------------------------------------------------------------------------------------------


class Forgetful(LateWorld):
    """Rank 0 does not wait for one collective of a kind.

    Args:
        size: ranks.
        kind: how its name begins.
        number: which of them.
    """

    def __init__(self, size: int, kind: str, number: int) -> None:
        super().__init__(size, timeout_s=10.0)
        self._kind = kind
        self._left = number
        self.forgotten: str | None = None

    def hand_out(self, rank: int, name: str, pending: Pending) -> Pending:
        if rank == 0 and name.startswith(self._kind):
            self._left -= 1
            if self._left < 0 and self.forgotten is None:
                self.forgotten = name
                return Done()
        return pending


@functools.cache
def undisturbed(case: str, size: int) -> list[Trained]:
    """What ranks train to without a fault; nobody changes it."""
    return train(case, LoopbackWorld(size), CPU)


@pytest.mark.parametrize(
    ("size", "case", "kind", "number"),
    [
        (1, "stage 0", "all_reduce sum of unit", 7),
        (2, "stage 1", "all_gather of unit", 7),
        (1, "stage 1", "reduce_scatter of unit", 7),
        (2, "stage 1", "all_reduce sum of gradient norm", 1),
        (2, "stage 1", "all_reduce max", 1),
        (1, "stage 3", "all_gather of unit 1", 3),
        (2, "stage 3", "all_gather of unit 1", 3),
        (2, "stage 3", "all_gather of unit 3 `rest`", 0),
        (2, "stage 3", "reduce_scatter of unit", 3),
        (2, "stage 3, recomputed", "all_gather of unit 2", 5),
        (2, "stage 3, frozen", "all_gather of unit", 11),
    ],
)
def test_one_wait_that_is_left_out_shows(size: int, case: str, kind: str, number: int) -> None:
    world = Forgetful(size, kind, number)
    expected = undisturbed(case, size)
    with pytest.raises((AssertionError, ModelError, ValueError)):  # other bits, no number, or written too early
        assert_same_bits(train(case, world, CPU), expected)
    assert world.forgotten is not None, "the fault was planted"
    assert world.forgotten in world.unwaited
