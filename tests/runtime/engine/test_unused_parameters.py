"""Parameters that no rank used in a step: left as plain torch leaves them, to the bit, wherever they are updated.

torch's optimizers pass over parameters whose gradient is None: neither values nor moments move, and the count of steps
that bias correction goes by does not. An engine's gradients are views of buffers, and its leaves hold many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import dsrun
from dsrun.runtime.optim.algorithms.adafactor import Adafactor
from dsrun.runtime.optim.algorithms.adam_mini import AdamMini
from dsrun.runtime.optim.algorithms.eight_bit import Adam8bit, Lion8bit
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.algorithms.muon import Muon
from support.inside_engine import deferred_update_of, shards_of, units_of
from support.ranks import run_ranks
from support.training import full_parameters

WIDTH = 32
BATCH = 4
STEPS = 6
#: What of the model each step uses: blocks, experts of each block, and whether the pooler counts. The first step leaves
#: out what later ones use, the second what the first has used; the last block is used by none.
PLAN: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...] = (
    ((0, 1), (0,), False),
    ((0,), (0, 1), True),
    ((0, 1), (1,), False),
    ((0, 1), (0, 1), True),
    ((1,), (0,), False),
    ((0, 1), (0, 1), True),
)


class Block(nn.Module):
    """Experts of which a step uses some, and a bias of its own that lies between two that are always used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BD: Tensor, experts: Sequence[int]) -> Tensor:
        y = self.norm(x_BD)
        for number in experts:
            y = y + F.gelu(self.experts[number](y))
        return x_BD + self.out(y)


class Partly(nn.Module):
    """A model of which no step uses everything."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(WIDTH))
        self.empty = nn.Parameter(torch.zeros(0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BD: Tensor, blocks: Sequence[int], experts: Sequence[int], pools: bool) -> Tensor:
        x = x_BD * self.scale.to(x_BD.dtype)
        for number in blocks:
            x = self.blocks[number](x, experts)
        return self.head(x) + (self.pooler(x) if pools else 0)


def model_of(seed: int = 3) -> Partly:
    torch.manual_seed(seed)
    return Partly()


def batch_of(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(50 + step))


def loss_of(model: Any, step: int, part: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
    return model(batch_of(step)[part].to(dtype), *PLAN[step % len(PLAN)]).float().square().mean()


#: The optimizers of the config with what makes momentum and decay act, and the same one over plain tensors.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], optim.Optimizer]]] = {
    "AdamW": (
        {"lr": 1e-2, "weight_decay": 0.1},
        lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "Adam": (
        {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
        lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "SGD": (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        # Not fused, for torch's fused one takes no parameter that is used for the first time beside others.
        lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    ),
    "Lion": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: Lion(params, lr=1e-2, weight_decay=0.1)),
    "NAdam": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: optim.NAdam(params, lr=1e-2, weight_decay=0.1)),
    "Adagrad": (
        {"lr": 1e-2, "weight_decay": 0.1},
        lambda params: optim.Adagrad(params, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "RMSprop": (
        {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9},
        lambda params: optim.RMSprop(params, lr=1e-2, weight_decay=0.1, momentum=0.9),
    ),
    "Lamb": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: Lamb(params, lr=1e-2, weight_decay=0.1)),
    "Muon": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: Muon(params, lr=1e-2, weight_decay=0.1)),
    "AdamMini": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: AdamMini(params, lr=1e-2, weight_decay=0.1)),
    "Adafactor": ({"lr": 1e-2, "weight_decay": 0.1}, lambda params: Adafactor(params, lr=1e-2, weight_decay=0.1)),
    "Adam8bit": (
        {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 500},
        lambda params: Adam8bit(params, lr=1e-2, weight_decay=0.1, min_8bit_size=500),
    ),
    "Lion8bit": (
        {"lr": 1e-2, "weight_decay": 0.1, "min_8bit_size": 500},
        lambda params: Lion8bit(params, lr=1e-2, weight_decay=0.1, min_8bit_size=500),
    ),
}
#: Their blocks of 256 elements lie in the flat buffer, and may hold elements of two tensors: no bits of plain tensors.
IN_8_BITS = ("Adam8bit", "Lion8bit")
STRUCTURED = ("Lamb", "Muon", "AdamMini", "Adafactor", "Adam8bit", "Lion8bit")


def settings_of(name: str, stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": OPTIMIZERS[name][0]},
        "zero_optimization": zero,
        "checkpoint": {"asynchronous": False},
        **more,
    }


def engine_of(settings: dict[str, Any], seed: int = 3) -> Any:
    return dsrun.initialize(model=model_of(seed), config=settings)[0]


def take(engine: Any, steps: range) -> None:
    """Takes steps of one rank, or of this rank's rows of each batch."""
    gas, size, rank = engine.gradient_accumulation_steps(), engine.world_size, engine.global_rank
    rows = BATCH // gas // size
    dtype = next(engine.module.head.parameters()).dtype
    for step in steps:
        for micro in range(gas):
            first = (micro * size + rank) * rows
            engine.backward(loss_of(engine, step, slice(first, first + rows), dtype))
            engine.step()


def plain(name: str, steps: range = range(STEPS)) -> tuple[dict[str, Tensor], optim.Optimizer]:
    """What plain torch makes of the model, and its optimizer."""
    model = model_of()
    trained = [(key, param) for key, param in model.named_parameters() if param.requires_grad and param.numel()]
    named = name in STRUCTURED  # these go by names
    optimizer = OPTIMIZERS[name][1](trained if named else [param for _, param in trained])
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, step).backward()
        optimizer.step()
    return {key: param.detach().clone() for key, param in model.named_parameters() if param.requires_grad}, optimizer


def plain_bf16(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """The same with bf16 parameters and fp32 masters."""
    model = model_of()
    masters = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters() if p.requires_grad}
    optimizer = OPTIMIZERS[name][1](list(masters.values()))
    model.bfloat16()
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        loss_of(model, step, dtype=torch.bfloat16).backward()
        for key, param in model.named_parameters():
            if key in masters:
                masters[key].grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for key, param in model.named_parameters():
                if key in masters:
                    param.copy_(masters[key])
    return {key: master.detach() for key, master in masters.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{what}: {name}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adamw_leaves_unused_parameters_and_their_count_of_steps_alone(stage: int) -> None:
    engine = engine_of(settings_of("AdamW", stage))
    take(engine, range(STEPS))
    expected, _ = plain("AdamW")
    assert_same(full_parameters(engine), expected)
    assert torch.equal(expected["never"], torch.ones(WIDTH))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("AdamW", *IN_8_BITS)])
def test_every_optimizer_leaves_them_alone(name: str) -> None:
    engine = engine_of(settings_of(name, 3))
    take(engine, range(STEPS))
    expected, _ = plain(name)
    assert_same(full_parameters(engine), expected, name)
    assert torch.equal(expected["never"], torch.ones(WIDTH))


@pytest.mark.parametrize("name", IN_8_BITS)
def test_states_of_8_bits_are_left_alone_at_every_stage_alike(name: str) -> None:
    found: list[dict[str, Tensor]] = []
    for stage in (0, 3):
        engine = engine_of(settings_of(name, stage))
        for step in range(STEPS):
            before, states, unused = full_parameters(engine), states_of(engine), unused_in(step)
            take(engine, range(step, step + 1))
            after = full_parameters(engine)
            for key in unused:
                assert torch.equal(after[key], before[key]), f"step {step}: {key}"
            for key, value in states_of(engine).items():
                same = torch.equal(value, states[key])
                assert same == (key[0] in unused) or not value.any(), f"step {step}: {key}"
        found.append(full_parameters(engine))
    assert_same(found[1], found[0], name)


def unused_in(step: int) -> set[str]:
    """Names of the parameters that a step gives no gradient."""
    model = model_of()
    loss_of(model, step).backward()
    return {name for name, param in model.named_parameters() if param.requires_grad and param.grad is None}


def states_of(engine: Any) -> dict[tuple[str, str], Tensor]:
    """Copies of this rank's states by name and role."""
    entries = shards_of(engine).saved.state_entries()
    return {(entry.name, entry.role): entry.tensor.clone() for entry in entries}


def _host(**more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", **more}}


#: Where masters and states lie, and how they are stepped there.
PLACES: dict[str, dict[str, Any]] = {
    "host": _host(),
    "ahead": _host(super_offload=True),
    "halves": {**_host(split_master=True), "offload_param": {"device": "cpu"}},
    "parameters": {**_host(), "offload_param": {"device": "cpu"}},
    "half of it": _host(ratio=0.5),
}
#: The optimizer sees what it steps in a dtype other than what it is kept in.
THROUGH_A_WINDOW: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize(("place", "name", "dtype"), [
    ("host", "AdamW", "fp32"), ("host", "SGD", "bf16"), ("ahead", "AdamW", "bf16"), ("ahead", "SGD", "fp32"),
    ("halves", "AdamW", "bf16"), ("parameters", "AdamW", "fp32"), ("parameters", "Lion", "bf16"),
    ("nvme", "AdamW", "fp32"), ("nvme", "SGD", "bf16"), ("none", "AdamW", "bf16"),
    ("half of it", "SGD", "fp32"), ("half of it", "AdamW", "bf16"), ("window", "AdamW", "bf16"),
    ("window", "NAdam", "bf16"),
    *(
        pytest.param(*case, marks=pytest.mark.soak("each place with both dtypes that it has, and with two optimizers"))
        for case in (
            ("host", "AdamW", "bf16"), ("host", "NAdam", "fp32"), ("ahead", "AdamW", "fp32"),
            ("nvme", "AdamW", "bf16"), ("none", "SGD", "bf16"), ("window", "SGD", "bf16"),
        )
    ),
])  # fmt: skip
def test_they_are_left_alone_wherever_they_are_stepped(place: str, name: str, dtype: str, tmp_path: Path) -> None:
    zero = PLACES.get(place, {})
    if place == "nvme":
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    more = THROUGH_A_WINDOW if place == "window" else {}
    engine = engine_of(settings_of(name, 3, zero=zero, bf16={"enabled": dtype == "bf16"}, **more))
    take(engine, range(STEPS))
    expected = plain_bf16(name) if dtype == "bf16" else plain(name)[0]
    found = masters_of(engine)
    engine.destroy()
    assert_same(found, expected, f"{place} {name} {dtype}")


def masters_of(engine: Any) -> dict[str, Tensor]:
    """This rank's masters whole, of one rank; also where they lie in halves."""
    if deferred_update_of(engine) is not None:
        deferred_update_of(engine).settle()
    found: dict[str, Tensor] = {}
    for unit in units_of(engine):
        whole = unit.whole_master()
        for extent in unit.layout.extents:
            found[extent.name] = whole[extent.offset :][: extent.numel].view(extent.shape).clone()
    return found


def test_units_that_come_to_the_device_go_on_with_their_own_counts() -> None:
    for name in ("AdamW", "SGD"):
        zero = _host(ratio="auto") | {"offload_placement": {"device_memory": 1, "remeasure_after": 2}}
        engine = engine_of(settings_of(name, 2, zero=zero))
        take(engine, range(2))
        update = deferred_update_of(engine)
        update.settle()
        away = [unit for unit in units_of(engine) if unit.steps_on_host]
        update.look_again(held_bytes=-(1 << 40))
        assert away
        assert not any(unit.steps_on_host for unit in away)
        take(engine, range(2, STEPS))
        assert_same(full_parameters(engine), plain(name)[0], name)


# What counts as used --------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two weights, of which the loss reads those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(64))
        self.second = nn.Parameter(torch.ones(64))

    def forward(self, *reads: str, factor: float = 1.0) -> Tensor:
        total: Any = sum((getattr(self, name) * factor).sum() for name in reads)
        return total


def two(stage: int = 0, **more: Any) -> Any:
    return dsrun.initialize(model=Two(), config=settings_of("SGD", stage, **more))[0]


def steps_of(engine: Any) -> set[str]:
    """Names of the parameters that a step has moved from where they began."""
    return {name for name, value in full_parameters(engine).items() if not torch.equal(value, torch.ones(64))}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_of_zero_is_a_gradient(stage: int) -> None:
    engine = two(stage)
    engine.backward(engine("first", factor=0.0))
    engine.step()
    assert steps_of(engine) == {"first"}, "weight decay acts on it"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_micro_step_is_enough(stage: int) -> None:
    engine = two(stage, gradient_accumulation_steps=3)
    for reads in (("second",), ("first", "second"), ("second",)):
        engine.backward(engine(*reads))
        engine.step()
    assert steps_of(engine) == {"first", "second"}
    before = full_parameters(engine)
    for _ in range(3):
        engine.backward(engine("second"))
        engine.step()
    after = full_parameters(engine)
    assert torch.equal(after["first"], before["first"]), "what an earlier batch has used does not count"
    assert not torch.equal(after["second"], before["second"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_stay_in_no_sync_count(stage: int) -> None:
    engine = two(stage)
    with engine.no_sync():
        engine.backward(engine("first"))
    engine.backward(engine("second"))
    engine.step()
    assert steps_of(engine) == {"first", "second"}


def test_a_gradient_that_a_script_sets_counts() -> None:
    for setter in (dsrun.utils.safe_set_full_grad, dsrun.utils.safe_set_local_grad):
        engine = two(2)
        engine.backward(engine("second"))
        setter(engine.module.first, torch.ones(64))
        engine.step()
        assert steps_of(engine) == {"first", "second"}


def test_a_gradient_that_a_hook_replaces_counts() -> None:
    engine = two(1)

    def replace(param: Tensor) -> None:
        param.grad = torch.full((64,), 2.0)

    engine.module.first.register_post_accumulate_grad_hook(replace)
    engine.backward(engine("first"))
    engine.step()
    assert steps_of(engine) == {"first"}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_the_scripts_own_counts(stage: int) -> None:
    engine = two(stage)
    engine("second").backward()
    engine.step()
    assert steps_of(engine) == {"second"}


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("no such gradient")


def test_a_backward_that_failed_has_used_nothing() -> None:
    engine = two(1)
    handle = engine.module.second.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        engine.backward(engine("second", "first"))
    handle.remove()
    engine.backward(engine("second"))
    engine.step()
    assert steps_of(engine) == {"second"}


def test_a_step_that_was_left_out_counts_for_none() -> None:
    engine = two(2, fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "hysteresis": 1})
    engine.backward(engine("first", "second", factor=float("inf")))
    engine.step()
    assert engine.skipped_steps == 1
    engine.backward(engine("second"))
    engine.step()
    assert steps_of(engine) == {"second"}
    assert engine.optimizer.state[shards_of(engine).runs[-1].param]


def test_deepspeeds_way_steps_them_with_a_gradient_of_zero() -> None:
    for zero in ({}, _host(), _host(super_offload=True)):
        engine = engine_of(settings_of("AdamW", 3, zero={"step_unused_parameters": True, **zero}))
        take(engine, range(STEPS))
        model = model_of()
        trained = [param for param in model.parameters() if param.requires_grad and param.numel()]
        optimizer = OPTIMIZERS["AdamW"][1](trained)
        for step in range(STEPS):
            for param in trained:
                param.grad = torch.zeros_like(param)
            loss_of(model, step).backward()
            optimizer.step()
        expected = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
        assert_same(full_parameters(engine), expected)


def test_what_was_never_used_has_no_state_and_a_whole_block_costs_no_leaf() -> None:
    for zero in ({}, _host()):
        engine = engine_of(settings_of("AdamW", 2, zero=zero))
        leaves = len(shards_of(engine).runs)
        for step in range(2):
            engine.backward(engine(batch_of(step), (step,), (0, 1, 2), True).square().mean())
            engine.step()
        # One more for `never`, which lies behind `scale`, and one where what follows it is used again.
        assert len(shards_of(engine).runs) - leaves == 2
        state = dsrun.utils.safe_get_full_optimizer_state
        assert state(engine.module.never, "exp_avg") is None
        assert state(engine.module.blocks[2].out.weight, "exp_avg") is None
        assert state(engine.module.blocks[1].out.weight, "exp_avg") is not None


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_states_in_fewer_bits_are_left_alone_and_go_on(form: str, tmp_path: Path) -> None:
    for device in ("cpu", "nvme"):
        where = {"device": device, "state_format": form, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
        settings = settings_of("AdamW", 2, zero={"offload_optimizer": where})
        engine = engine_of(settings)
        for step in range(3):
            before, unused = states_of(engine), unused_in(step)
            take(engine, range(step, step + 1))
            deferred_update_of(engine).settle()
            for key, value in states_of(engine).items():
                if key[0] in unused:
                    assert torch.equal(value, before[key]), f"step {step}: {key}"
        engine.save_checkpoint(tmp_path / "saved")
        take(engine, range(3, STEPS))
        expected = full_parameters(engine)
        engine.destroy()
        other = engine_of(settings, seed=99)
        other.load_checkpoint(tmp_path / "saved")
        take(other, range(3, STEPS))
        assert_same(full_parameters(other), expected, f"{form} {device}")
        other.destroy()


# Going on from a checkpoint -------------------------------------------------------------------------------------------


def _save_in_the_middle(folder: str, names: list[str], stage: int) -> None:
    for name in names:
        engine = engine_of(settings_of(name, stage, train_micro_batch_size_per_gpu=BATCH // 2))
        take(engine, range(3))
        engine.save_checkpoint(f"{folder}/{name}")
        engine.destroy()


def _go_on(folder: str, names: list[str], settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for name in names:
        made = settings_of(name, **settings)
        engine = engine_of(made, seed=99)
        engine.load_checkpoint(f"{folder}/{name}")
        take(engine, range(3, STEPS))
        found.append(full_parameters(engine))
        engine.destroy()
    return found


RESUMED = ["AdamW", "SGD", "Lamb", "Adam8bit"]


def test_a_run_goes_on_with_other_counts_of_steps_at_another_world_size_stage_and_offload(tmp_path: Path) -> None:
    run_ranks(2, _save_in_the_middle, str(tmp_path), RESUMED, 2)
    alone: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH // 2, "gradient_accumulation_steps": 2}
    here = _go_on(str(tmp_path), RESUMED, {"stage": 0, **alone})
    undisturbed = [_undisturbed(name, alone) for name in RESUMED]
    for name, found, expected in zip(RESUMED, here, undisturbed, strict=True):
        assert_same(found, expected, name)
    for number, place in ((0, "host"), (0, "ahead"), (1, "host")):
        (there,) = _go_on(str(tmp_path), RESUMED[number : number + 1], {"stage": 3, **alone, "zero": PLACES[place]})
        assert_same(there, undisturbed[number], f"{RESUMED[number]} {place}")


def _undisturbed(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(settings_of(name, 1, **settings))
    take(engine, range(STEPS))
    return full_parameters(engine)


def _on_two_ranks(stage: int, name: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(settings_of(name, stage, zero=zero, train_micro_batch_size_per_gpu=BATCH // 2))
    for step in range(STEPS):
        rank, rows = engine.global_rank, BATCH // 2
        plan = PLAN[step]
        # Each rank has an expert of its own: what one of them uses has a mean over both.
        mine = batch_of(step)[rank * rows : (rank + 1) * rows]
        engine.backward(engine(mine, plan[0], (rank,), plan[2] and rank == 1).square().mean())
        engine.step()
    return full_parameters(engine)


def _plain_of_two_ranks(name: str) -> dict[str, Tensor]:
    model, rows = model_of(), BATCH // 2
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad and param.numel()}
    optimizer = OPTIMIZERS[name][1](list(trained.values()))
    for step in range(STEPS):
        plan = PLAN[step]
        optimizer.zero_grad(set_to_none=True)
        for rank in range(2):
            mine = batch_of(step)[rank * rows : (rank + 1) * rows]
            (model(mine, plan[0], (rank,), plan[2] and rank == 1).square().mean() / 2).backward()
        optimizer.step()
    return {key: param.detach().clone() for key, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize(("stage", "name", "place"), [
    (0, "AdamW", ""), (2, "AdamW", ""), (3, "SGD", ""), (3, "AdamW", "host"), (2, "AdamW", "ahead"),
])  # fmt: skip
def test_what_one_rank_uses_is_used_and_what_none_uses_is_left_alone(stage: int, name: str, place: str) -> None:
    found = run_ranks(2, _on_two_ranks, stage, name, PLACES.get(place, {}))
    expected = _plain_of_two_ranks(name)
    for one in found:
        assert_same(one, expected, f"stage {stage}")
