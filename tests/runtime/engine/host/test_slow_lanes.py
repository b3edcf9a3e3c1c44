"""With every copy of every bus as late as it may be, training has the bits that it has without, and so on late ranks.

On the CPU a copy is made by who waits for it; on CUDA it sleeps on its lane: see `support/slow_lanes.py`. Collectives
are late too, see `support/late_collectives.py`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.config.rules.activation import FEWEST_BUFFERS
from dsrun.errors import DsrunError
from dsrun.runtime.memory.bus import Event, Kind
from dsrun.runtime.mesh.loopback import LoopbackWorld
from support.devices import on_devices
from support.late_collectives import LateWorld
from support.models import TinyGPT
from support.slow_lanes import LateBus, late_bus
from support.threaded_ranks import MakeBus, ThisThread, Trained, assert_same_bits, train_in
from support.training import batches, config

CPU = torch.device("cpu")
#: Samples of a step, and a limit that acts in some of the steps and not in all.
CLIPPING = {1: 2.7, 2: 1.9, 3: 1.6, 4: 1.398}

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
AHEAD = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
SPLIT = {"offload_optimizer": {"device": "cpu", "split_master": True}}
PARAMS = {"offload_param": {"device": "cpu"}}
ON_DISK = {"offload_optimizer": {"device": "nvme", "nvme_path": "here"}}
PARAMS_ON_DISK = {"offload_param": {"device": "nvme", "nvme_path": "here", "max_in_cpu": 20_000}}
BF16 = {"bf16": True}
RINGS = {"activation_checkpointing": {"policy": "every_block", "cpu_checkpointing": True}}
RINGS_ON_DISK = {
    "activation_checkpointing": {
        "policy": "every_block",
        "cpu_checkpointing": True,
        "nvme_path": "here",
        "nvme_buffer_count": FEWEST_BUFFERS,
    }
}

#: With more blocks, for the last ones in a ring on a disk are still in memory when backward begins.
DEEP = ("rings on disk",)
#: Ranks, stage, keys of `zero_optimization`, accumulation steps, and the rest of the config.
CASES: dict[str, tuple[int, int, dict[str, Any], int, dict[str, Any]]] = {
    "optimizer, stage 1": (1, 1, OPTIMIZER, 1, BF16),
    "optimizer, stage 2, fp32": (2, 2, OPTIMIZER, 2, {}),
    "optimizer, stage 2, three ranks": (3, 2, OPTIMIZER, 1, BF16),
    "optimizer, stage 3": (2, 3, OPTIMIZER, 1, BF16),
    "ahead, stage 1": (1, 1, AHEAD, 1, BF16),
    "ahead, stage 2": (2, 2, AHEAD, 2, BF16),
    "ahead, stage 3, fp32": (2, 3, AHEAD, 1, {}),
    "half, stage 2": (1, 2, HALF, 2, BF16),
    "params": (1, 3, PARAMS, 2, BF16),
    "params, two ranks": (2, 3, PARAMS, 1, BF16),
    "params and optimizer": (2, 3, {**OPTIMIZER, **PARAMS}, 2, BF16),
    "params and optimizer, fp32": (1, 3, {**OPTIMIZER, **PARAMS}, 1, {}),
    "params and ahead": (1, 3, {**AHEAD, **PARAMS}, 2, BF16),
    "params and half": (2, 3, {**HALF, **PARAMS}, 1, BF16),
    "params and halves of masters": (2, 3, {**SPLIT, **PARAMS}, 2, BF16),
    "optimizer on disk": (1, 2, ON_DISK, 2, BF16),
    "params on disk": (1, 3, PARAMS_ON_DISK, 2, BF16),
    "rings": (1, 2, {}, 2, {**BF16, **RINGS}),
    "rings on disk": (1, 2, {}, 2, {**BF16, **RINGS_ON_DISK}),
    "rings, params and optimizer": (2, 3, {**OPTIMIZER, **PARAMS}, 2, {**BF16, **RINGS}),
}
#: On a GPU: each thing that leaves it, by one rank and by several, on disk once.
ON_GPU = (
    "optimizer, stage 2, three ranks",
    "ahead, stage 2",
    "params",
    "params and ahead",
    "params on disk",
    "rings",
    "rings, params and optimizer",
)
#: On the CPU left out by default.
SOAK = (
    "optimizer, stage 2, fp32",
    "optimizer, stage 3",
    "ahead, stage 1",
    "params, two ranks",
    "params and half",
    "rings",
)


def model_of(case: str) -> nn.Module:
    return TinyGPT(width=40, layers=8 if case in DEEP else 4)


def settings_of(case: str, folder: Path) -> dict[str, Any]:
    size, stage, zero, accumulation, options = CASES[case]
    settings = config(stage, micro=1, accumulation=accumulation, **options)
    settings["gradient_clipping"] = 2.1 if case in DEEP else CLIPPING[size * accumulation]
    settings["zero_optimization"] |= {name: _placed(section, folder) for name, section in zero.items()}
    if "activation_checkpointing" in settings:
        settings["activation_checkpointing"] = _placed(settings["activation_checkpointing"], folder)
    return settings


def _placed(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**section, "nvme_path": str(folder)} if "nvme_path" in section else section


def evaluates(engine: Any, noted: list[Tensor]) -> None:
    """A forward without a backward: it may read parameters that are still on their way."""
    with torch.no_grad():
        noted.append(engine(batches(99, samples=1)[0].to(engine.device)).clone())


def train(
    case: str,
    world: LoopbackWorld,
    device: torch.device,
    folder: Path,
    *,
    bus: MakeBus | None = None,
    ring_bus: MakeBus | None = None,
) -> list[Trained]:
    return train_in(
        world,
        settings_of(case, folder),
        device=device,
        model=partial(model_of, case),
        bus=bus,
        ring_bus=ring_bus,
        steps=3,
        between=evaluates,
    )


@pytest.mark.gpu_seconds(1.3)
@pytest.mark.parametrize(
    ("device", "case"),
    on_devices(CASES, on_gpu=ON_GPU, soak=SOAK, stands="each thing that leaves, at another stage or with others"),
    indirect=["device"],
)
def test_copies_that_come_late_change_no_bit(device: torch.device, case: str, tmp_path: Path) -> None:
    size = CASES[case][0]
    late = LateWorld(size, device=device)
    found = train(case, late, device, tmp_path, bus=late_bus, ring_bus=late_bus)
    norms = found[0].norms
    assert max(norms) > settings_of(case, tmp_path)["gradient_clipping"] > min(norms), norms
    assert_same_bits(found, train(case, LoopbackWorld(size), device, tmp_path))


# That it can fail -----------------------------------------------------------------------------------------------------


class _Made:
    """A copy of which somebody believes that it has been made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Forgetful(LateBus):
    """Nobody waits for the copies of one kind and way, from one of them on, and those that come after them alone.

    Args:
        kind: of the copies.
        out: those to the host; else to the device.
        first: the first of them.
    """

    def __init__(self, kind: Kind, *, out: bool, first: int) -> None:
        super().__init__()
        self._forgets = kind
        self._is_out = out
        self._left = first

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        return self._given(super().start_out(source_N, host_N, kind=kind, after=after, mark=mark), kind, out=True)

    def start_back(
        self, host_N: Tensor, target_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        return self._given(super().start_back(host_N, target_N, kind=kind, after=after, mark=mark), kind, out=False)

    def _given(self, event: Event, kind: Kind, *, out: bool) -> Event:
        if kind == self._forgets and out == self._is_out:
            self._left -= 1
            if self._left < 0:
                return _Made()
        return event


@functools.cache
def undisturbed(case: str) -> list[Trained]:
    """What this thread trains to without a fault; nobody changes it."""
    with tempfile.TemporaryDirectory() as folder:
        return train(case, ThisThread(), CPU, Path(folder))


@pytest.mark.parametrize(
    ("case", "kind", "out", "first"),
    [
        ("optimizer, stage 1", "gradients", True, 8),
        ("optimizer, stage 1", "parameters", False, 8),
        ("ahead, stage 1", "gradients", True, 8),
        ("ahead, stage 1", "parameters", False, 8),
        ("half, stage 2", "gradients", True, 2),
        ("half, stage 2", "parameters", False, 2),
        ("params", "parameters", False, 20),
        ("params", "parameters", True, 5),
        ("params and ahead", "parameters", False, 20),
        ("params and ahead", "gradients", True, 8),
        ("optimizer on disk", "gradients", True, 8),
        ("rings", "activations", False, 4),
        ("rings on disk", "activations", True, 4),
    ],
)
def test_waits_that_are_left_out_show(case: str, kind: Kind, out: bool, first: int, tmp_path: Path) -> None:
    made: list[LateBus] = []

    def forgetful(device: torch.device) -> LateBus:
        made.append(Forgetful(kind, out=out, first=first))
        return made[-1]

    def assert_nothing_is_seen() -> None:
        is_ring = kind == "activations"
        bus, ring_bus = (None, forgetful) if is_ring else (forgetful, None)
        assert_same_bits(train(case, ThisThread(), CPU, tmp_path, bus=bus, ring_bus=ring_bus), expected)

    expected = undisturbed(case)
    with pytest.raises((AssertionError, DsrunError, ValueError)):
        assert_nothing_is_seen()
    assert made, "the fault was planted"


class _SeenByTheDevice:
    """A copy that the host takes for made when only the device waits for it."""

    def __init__(self, bus: LateBus, event: Event) -> None:
        self._bus = bus
        self._event = event

    def query(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._bus.wait(self._event)


class Confused(LateBus):
    """Has the device wait where the host should."""

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        return _SeenByTheDevice(self, super().start_out(source_N, host_N, kind=kind, after=after, mark=mark))


@pytest.mark.parametrize("case", ["optimizer, stage 1", "ahead, stage 1", "optimizer on disk", "rings on disk"])
def test_a_wait_of_the_device_in_place_of_one_of_the_host_shows(case: str, tmp_path: Path) -> None:
    def confused(device: torch.device) -> LateBus:
        return Confused()

    expected = undisturbed(case)
    with pytest.raises((AssertionError, DsrunError, ValueError)):
        assert_same_bits(train(case, ThisThread(), CPU, tmp_path, bus=confused, ring_bus=confused), expected)
