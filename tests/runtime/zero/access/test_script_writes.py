"""Weights that scripts write and read between the engine's steps, beside plain torch: at every stage and offload."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import dsrun
from dsrun.errors import ModelError
from support.models import TinyGPT
from support.models import loss_of as cross_entropy
from support.ranks import run_ranks
from support.training import batches, config

#: Without vector tails, so that flat ranges and whole tensors are summed and updated by the same kernels.
ROUND = {"width": 64, "vocab": 64, "odd": 0, "layers": 2}
STEPS = 3
HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}


def placements(folder: Path) -> dict[str, dict[str, Any]]:
    """Sections `zero_optimization` of what there is of stages and offload."""
    nvme = {"nvme_path": str(folder)}
    return {
        **{f"stage {stage}": {"stage": stage} for stage in range(4)},
        "stage 1, host": {"stage": 1, **HOST},
        "stage 2, host": {"stage": 2, **HOST},
        "stage 2, nvme": {"stage": 2, "offload_optimizer": {"device": "nvme", **nvme}},
        "stage 3, host": {"stage": 3, **HOST},
        "stage 3, ahead": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        "stage 3, nvme": {"stage": 3, "offload_optimizer": {"device": "nvme", **nvme}},
        "stage 3, parameters on the host": {"stage": 3, **HOST, "offload_param": {"device": "cpu"}},
        "stage 3, parameters on nvme": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", **nvme},
            "offload_param": {"device": "nvme", **nvme},
        },
    }


def model_of(seed: int = 7) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(**ROUND)


def settings_of(zero: dict[str, Any], *, bf16: bool) -> dict[str, Any]:
    return config(0, micro=2, bf16=bf16, gradient_clipping=0) | {"zero_optimization": zero}


def loss(model: Any, seed: int, *, first: int = 0) -> Tensor:
    inputs, targets = batches(seed, samples=4)
    return cross_entropy(model(inputs[first : first + 2]), targets[first : first + 2])


class Plain:
    """Training as a script of plain torch does it: fp32 masters beside a model in bf16, or none in fp32."""

    def __init__(self, model: nn.Module, *, bf16: bool) -> None:
        self.model = model.bfloat16() if bf16 else model
        self.bf16 = bf16
        self.masters = [p.detach().float().clone() if bf16 else p for p in model_of().parameters()]
        if not bf16:
            self.masters = list(model.parameters())
        self.optimizer = optim.AdamW(self.masters, lr=1e-2, weight_decay=0.1, fused=True)

    def step(self) -> None:
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            if not self.bf16:
                continue
            # What was written since is the master's value, where rounding the master does not give it anyway.
            master.copy_(torch.where(master.bfloat16() != param.detach(), param.detach().float(), master))
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.grad = None
                if self.bf16:
                    param.copy_(master)


Write = Callable[[nn.Module, int], None]


def clamp(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def scale(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.75)


def scale_at_once(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.75)


def normalise(model: Any, step: int) -> None:
    with torch.no_grad():
        model.head.weight.copy_(F.normalize(model.head.weight, dim=1))


def start_again(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        nn.init.xavier_normal_(model.head.weight)
        model.blocks[0].up.reset_parameters()


def one_row(model: Any, step: int) -> None:
    model.embed.weight.data[3] = 0.125
    with torch.no_grad():
        model.blocks[1].qkv.weight[2:4].zero_()
        model.position[0] = 0.25


def other_memory(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def as_a_vector(model: nn.Module, step: int) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def swap(model: nn.Module, step: int) -> None:
    """Other weights for a while, for an evaluation, by other memory."""
    kept = [param.data for param in model.parameters()]
    for param in model.parameters():
        param.data = torch.zeros_like(param)
    for param, values in zip(model.parameters(), kept, strict=True):
        param.data = values


def swap_in_place(model: nn.Module, step: int) -> None:
    kept = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        for param, values in zip(model.parameters(), kept, strict=True):
            param.copy_(values)


def in_inference_mode(model: nn.Module, step: int) -> None:
    with torch.inference_mode():
        for param in model.parameters():
            param.mul_(0.75)


WRITES: dict[str, Write] = {
    w.__name__: w
    for w in (
        clamp,
        scale,
        scale_at_once,
        normalise,
        start_again,
        one_row,
        other_memory,
        as_a_vector,
        swap,
        swap_in_place,
        in_inference_mode,
    )
}


#: Placements that come by what is written in different ways, and writes that are tried at all others too.
DIFFERENT = ("stage 0", "stage 2, host", "stage 3", "stage 3, parameters on the host")
EVERYWHERE = ("one_row", "other_memory")
#: Masters have the values of other memory from the next step on.
MOVES = (other_memory, as_a_vector)


def train_plain(write: Write, *, bf16: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns losses and masters."""
    plain = Plain(model_of(), bf16=bf16)
    losses = list[Tensor]()
    for step in range(STEPS):
        found = loss(plain.model, step)
        found.backward()
        plain.step()
        losses.append(found.detach())
        if step < STEPS - 1 or write not in MOVES:
            write(plain.model, step)
    plain_loss = loss(plain.model, STEPS).detach()
    # The last write reaches masters with the next look at them.
    if bf16:
        for master, param in zip(plain.masters, plain.model.parameters(), strict=True):
            master.copy_(torch.where(master.bfloat16() != param.detach(), param.detach().float(), master))
    return [*losses, plain_loss], [master.detach() for master in plain.masters]


def train_engine(zero: dict[str, Any], write: Write, *, bf16: bool) -> tuple[list[Tensor], list[Tensor]]:
    engine = dsrun.initialize(model=model_of(), config=settings_of(zero, bf16=bf16))[0]
    losses = list[Tensor]()
    for step in range(STEPS):
        found = loss(engine, step)
        engine.backward(found)
        engine.step()
        losses.append(found.detach())
        if step < STEPS - 1 or write not in MOVES:
            write(engine.module, step)
    losses.append(loss(engine, STEPS).detach())
    masters = [dsrun.zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return losses, [master for master in masters if master is not None]


#: Writes that are tried in fp32 by default: in place, by other memory, and put back. All others are in bf16.
IN_FP32 = ("scale", "other_memory", "swap_in_place")


def writes() -> list[Any]:
    found: list[Any] = []
    for bf16, dtype in ((False, "fp32"), (True, "bf16")):
        for name in WRITES:
            # By two ranks, other memory in bf16 has its case in the next test.
            by_default = name != "other_memory" if bf16 else name in IN_FP32
            soak = pytest.mark.soak("in the other dtype by default")
            found.append(pytest.param(name, bf16, id=f"{name}-{dtype}", marks=() if by_default else soak))
    return found


@pytest.mark.parametrize(("name", "bf16"), writes())
def test_what_a_script_writes_between_steps_is_trained_on_as_in_plain_torch(
    name: str, bf16: bool, tmp_path: Path
) -> None:
    losses, masters = train_plain(WRITES[name], bf16=bf16)
    for place, zero in placements(tmp_path).items():
        if place not in DIFFERENT and name not in EVERYWHERE:
            continue
        theirs, trained = train_engine(zero, WRITES[name], bf16=bf16)
        assert [float(x) for x in theirs] == [float(x) for x in losses], place
        for number, (one, other) in enumerate(zip(trained, masters, strict=True)):
            assert torch.equal(one, other), f"{place}: parameter {number}"


def _train_everywhere(places: list[dict[str, Any]], name: str, bf16: bool) -> list[tuple[list[float], list[Tensor]]]:
    return [_train_ranks(zero, name, bf16) for zero in places]


def _train_ranks(zero: dict[str, Any], name: str, bf16: bool) -> tuple[list[float], list[Tensor]]:
    """Two steps, each followed by a write; returns what the ranks' losses add up to, and masters."""
    engine = dsrun.initialize(model=model_of(), config=settings_of(zero, bf16=bf16))[0]
    losses = list[float]()
    for step in range(3):
        found = loss(engine, step, first=2 * engine.global_rank)
        engine.backward(found)
        engine.step()
        losses.append(float(found.detach()))
        if step < 2:
            WRITES[name](engine.module, step)
    masters = [dsrun.zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return losses, [master for master in masters if master is not None]


_ALIKE = pytest.mark.soak("`one_row` writes in place as well, and this write has its case on one rank")


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        pytest.param("clamp", True, marks=_ALIKE),
        ("one_row", True),
        ("other_memory", True),
        pytest.param("scale_at_once", False, marks=_ALIKE),
        ("as_a_vector", False),
    ],
)
def test_what_two_ranks_write_alike_is_the_same_at_every_stage(name: str, bf16: bool, tmp_path: Path) -> None:
    places = ("stage 0", "stage 1", "stage 2, host", "stage 3", "stage 3, parameters on the host")
    for found in run_ranks(2, _train_everywhere, [placements(tmp_path)[place] for place in places], name, bf16):
        right, values = found[0]
        for place, (losses, masters) in zip(places, found, strict=True):
            assert losses == right, place
            assert all(torch.equal(*pair) for pair in zip(masters, values, strict=True)), place


def _perturbed(model: nn.Module, step: int) -> Callable[[], None]:
    """Other weights, as optimizers have them that look for flat minima; returns what puts the old ones back."""
    kept = [param.detach().clone() for param in model.parameters()]
    torch.manual_seed(step)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.01)

    def restore() -> None:
        with torch.no_grad():
            for param, values in zip(model.parameters(), kept, strict=True):
                param.copy_(values)

    return restore


#: bf16, and whether each place is tried.
EVERYWHERE = [
    pytest.param(False, False, id="fp32"),
    pytest.param(True, True, id="bf16"),
    pytest.param(False, True, id="fp32-all", marks=pytest.mark.soak("all places in bf16, and two of them")),
]


@pytest.mark.parametrize(("bf16", "every"), EVERYWHERE)
def test_weights_that_are_put_back_before_the_step_leave_masters_their_bits(
    bf16: bool, every: bool, tmp_path: Path
) -> None:
    """A forward and a backward come between, and others ask for the weights: no one needs masters to."""
    plain = Plain(model_of(), bf16=bf16)
    expected = list[float]()
    for step in range(STEPS):
        restore = _perturbed(plain.model, step)
        value = loss(plain.model, step)
        value.backward()
        restore()
        plain.step()
        expected.append(float(value.detach()))
    for place in (*DIFFERENT, "stage 3, ahead") if every else ("stage 2, host", "stage 3"):
        engine = dsrun.initialize(model=model_of(), config=settings_of(placements(tmp_path)[place], bf16=bf16))[0]
        found = list[float]()
        for step in range(STEPS):
            restore = _perturbed(engine.module, step)
            value = loss(engine, step)
            engine.backward(value)
            engine.module.state_dict()
            with dsrun.zero.GatheredParameters(engine.module.parameters()):
                copy.deepcopy(engine.module)
            restore()
            engine.step()
            found.append(float(value.detach()))
        assert found == expected, place


# By references that a script has kept ---------------------------------------------------------------------------------


def _with_references(zero: dict[str, Any]) -> list[float]:
    engine = dsrun.initialize(model=model_of(), config=settings_of(zero, bf16=True))[0]
    params = list(engine.module.parameters())
    aliases = [param.data for param in params[:8]]
    found = list[float]()
    for step in range(STEPS):
        value = loss(engine, step)
        engine.backward(value)
        engine.step()
        for alias in aliases:
            alias.clamp_(-0.03, 0.03)
        with torch.no_grad():
            for param in params[8:]:
                param.mul_(0.5)
        found += [
            float(value.detach()),
            float(aliases[3].double().square().sum()),
            float(params[-1].detach().sum()),
        ]
    engine.destroy()
    return found


def test_references_and_aliases_that_a_script_keeps_stay_good(tmp_path: Path) -> None:
    """Written to right behind the step, while an update may still be on its way."""
    found = {place: _with_references(zero) for place, zero in placements(tmp_path).items()}
    for place, losses in found.items():
        assert losses == found["stage 0"], place


@pytest.mark.parametrize("place", ["stage 0", "stage 2, host", "stage 3", "stage 3, parameters on nvme"])
def test_copies_of_parameters_are_ordinary_tensors(place: str, tmp_path: Path) -> None:
    engine = dsrun.initialize(model=model_of(), config=settings_of(placements(tmp_path)[place], bf16=True))[0]
    weight = engine.module.head.weight
    values = weight.detach().clone()
    assert type(values) is Tensor
    copied = [copy.deepcopy(weight.data), pickle.loads(pickle.dumps(weight.data)), weight.data.cpu().clone()]
    for other in copied:
        assert type(other) is Tensor
        other.zero_()
    assert torch.equal(weight.detach().clone(), values), "nothing of that has reached the parameter"
    assert nn.Parameter(weight.data.clone()).shape == weight.shape
    assert str(weight.shape) == "torch.Size([64, 64])"
    assert "Parameter" in repr(weight)


def test_questions_about_a_parameter_gather_nothing() -> None:
    engine = dsrun.initialize(model=model_of(), config=settings_of({"stage": 3}, bf16=False))[0]
    before = engine.counters().collectives.calls
    for param in engine.module.parameters():
        param.shape, param.dtype, param.device, param.grad, param.requires_grad, param.is_leaf, param.ndim  # noqa: B018
        param.numel(), param.size(), param.dim(), param.is_floating_point(), hash(param), repr(param), len(param)
        torch.zeros_like(param), param.new_zeros(3), param.register_hook(lambda grad: grad).remove()
        assert param.to("cpu") is param
        assert param.float() is param
    engine.module.to("cpu").float()
    engine.module.zero_grad()
    engine.module.state_dict()
    assert engine.counters().collectives.calls == before


# Reads outside of forward, with gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize(
    "place", ["stage 1", "stage 2, host", "stage 3", "stage 3, host", "stage 3, parameters on the host"]
)
def test_a_penalty_on_the_weights_trains_on_present_values(place: str, begins: int, tmp_path: Path) -> None:
    def penalised(model: Any, module: nn.Module, step: int) -> Tensor:
        value = loss(model, step)
        return value if step < begins else value + sum(p.square().sum() for p in module.parameters()) * 0.01

    plain = Plain(model_of(), bf16=False)
    engine = dsrun.initialize(model=model_of(), config=settings_of(placements(tmp_path)[place], bf16=False))[0]
    for step in range(4):
        expected = penalised(plain.model, plain.model, step)
        expected.backward()
        plain.step()
        found = penalised(engine, engine.module, step)
        engine.backward(found)
        norms = [float(param.detach().norm()) for param in engine.module.parameters()]
        with dsrun.zero.GatheredParameters(engine.module.parameters()):
            assert norms == [float(param.detach().norm()) for param in engine.module.parameters()]
        engine.step()
        assert float(found.detach()) == float(expected.detach()), f"step {step}"


# Writes inside forward ------------------------------------------------------------------------------------------------


class Momentum(nn.Module):
    """An encoder beside a copy of it that follows slowly, moved inside forward, as MoCo, BYOL and DINO have it.

    Args:
        by: how the copy is written.
    """

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.by == "data":
                    slow.data = slow.data * 0.9 + fast.data * 0.1
                elif self.by == "data in place":
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                else:
                    slow.copy_(slow * 0.9 + fast * 0.1)
        return F.mse_loss(self.student(x), self.teacher(x * 1.5))


def _momentum(stage: int, by: str, bf16: bool, folder: str) -> list[float]:
    torch.manual_seed(5)
    engine = dsrun.initialize(model=Momentum(by), config=settings_of({"stage": stage}, bf16=bf16))[0]
    dtype = torch.bfloat16 if bf16 else torch.float32
    found = list[float]()
    for step in range(6):
        torch.manual_seed(100 + step)
        value = engine(torch.randn(4, 32).to(dtype))
        engine.backward(value)
        engine.step()
        found.append(float(value.detach()))
        if step == 2:
            engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    for step in range(3, 6):
        torch.manual_seed(100 + step)
        value = engine(torch.randn(4, 32).to(dtype))
        engine.backward(value)
        engine.step()
        found.append(float(value.detach()))
    return found


_OTHER_DTYPE = pytest.mark.soak("the same way in the other dtype")


@pytest.mark.parametrize(
    ("by", "bf16"),
    [
        pytest.param("data", False, id="data-fp32"),
        pytest.param("data", True, id="data-bf16"),
        pytest.param("data in place", False, id="data in place-fp32", marks=_OTHER_DTYPE),
        pytest.param("data in place", True, id="data in place-bf16"),
        pytest.param("copy", False, id="copy-fp32"),
        pytest.param("copy", True, id="copy-bf16", marks=_OTHER_DTYPE),
    ],
)
def test_encoders_that_follow_inside_forward_are_the_same_at_every_stage_and_resume(
    by: str, bf16: bool, tmp_path: Path
) -> None:
    found = {stage: _momentum(stage, by, bf16, str(tmp_path / str(stage))) for stage in range(4)}
    for stage, losses in found.items():
        assert losses == found[0], f"stage {stage}"
        assert losses[3:6] == losses[6:], f"stage {stage} goes on from a checkpoint"
    if not bf16:
        torch.manual_seed(5)
        plain = Plain(Momentum(by), bf16=False)
        plain.optimizer = optim.AdamW(plain.model.student.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(6):
            torch.manual_seed(100 + step)
            value = plain.model(torch.randn(4, 32))
            value.backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            assert float(value.detach()) == found[0][step]


class Constrained(nn.Module):
    """Blocks that change their own weights inside their forward: EEGNet's norm, BinaryConnect's clamp, max_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64, max_norm=0.5)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        for block, forward in zip(self.blocks, (self._renormed, self._clamped, self._written), strict=True):
            block.forward = forward.__get__(block)  # type: ignore[method-assign]

    @staticmethod
    def _renormed(block: Any, x: Tensor) -> Tensor:
        block.weight.data = torch.renorm(block.weight.data, p=2, dim=0, maxnorm=0.5)
        return F.linear(x, block.weight, block.bias)

    @staticmethod
    def _clamped(block: Any, x: Tensor) -> Tensor:
        block.weight.data.clamp_(-0.05, 0.05)
        return F.linear(x, block.weight, block.bias)

    @staticmethod
    def _written(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.weight.mul_(0.9)
        return F.linear(x, block.weight, block.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize(("bf16", "every"), EVERYWHERE)
def test_blocks_that_write_to_their_own_weights_train_as_in_plain_torch(
    bf16: bool, every: bool, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    plain = Plain(Constrained(), bf16=bf16)
    if bf16:
        plain.masters = [param.detach().float() for param in Constrained().parameters()]
        torch.manual_seed(5)
        plain.masters = [param.detach().clone() for param in Constrained().parameters()]
        plain.optimizer = optim.AdamW(plain.masters, lr=1e-2, weight_decay=0.1, fused=True)
    expected = list[float]()
    for step in range(STEPS):
        torch.manual_seed(step)
        value = plain.model(torch.randint(0, 64, (4, 8)))
        value.backward()
        plain.step()
        expected.append(float(value.detach()))
    places = ("stage 0", "stage 2", "stage 2, host", "stage 3", "stage 3, host", "stage 3, parameters on nvme")
    for place in places if every else (places[2], places[3]):
        torch.manual_seed(5)
        engine = dsrun.initialize(model=Constrained(), config=settings_of(placements(tmp_path)[place], bf16=bf16))[0]
        found = list[float]()
        for step in range(STEPS):
            torch.manual_seed(step)
            value = engine(torch.randint(0, 64, (4, 8)))
            engine.backward(value)
            engine.step()
            found.append(float(value.detach()))
        assert found == expected, place


def _halve_in_place(block: Any) -> None:
    block.up.weight.data.mul_(0.5)


def _give_half(block: Any) -> None:
    block.up.weight.data = block.up.weight.data * 0.5


@pytest.mark.parametrize(
    ("write", "bf16"),
    [
        pytest.param(_halve_in_place, False, id="in place-fp32", marks=_OTHER_DTYPE),
        pytest.param(_halve_in_place, True, id="in place-bf16"),
        pytest.param(_give_half, False, id="other memory-fp32"),
        pytest.param(_give_half, True, id="other memory-bf16", marks=_OTHER_DTYPE),
    ],
)
def test_blocks_whose_weights_a_forward_writes_to_outside_of_them_train_as_in_plain_torch(
    write: Callable[[Any], None], bf16: bool, tmp_path: Path
) -> None:
    """By attributes, which are no parameters while a forward runs outside of their block."""

    def hooked() -> TinyGPT:
        model = model_of()
        model.blocks[0].register_forward_hook(lambda *_: write(model.blocks[1]))
        return model

    plain = Plain(hooked(), bf16=bf16)
    expected = list[float]()
    for step in range(STEPS):
        value = loss(plain.model, step)
        value.backward()
        plain.step()
        expected.append(float(value.detach()))
    for place in DIFFERENT:
        engine = dsrun.initialize(model=hooked(), config=settings_of(placements(tmp_path)[place], bf16=bf16))[0]
        found = list[float]()
        for step in range(STEPS):
            value = loss(engine, step)
            engine.backward(value)
            engine.step()
            found.append(float(value.detach()))
        assert found == expected, place


# What is refused ------------------------------------------------------------------------------------------------------


def _write_on_one(stage: int, bf16: bool, by: str) -> str:
    engine = dsrun.initialize(model=model_of(), config=settings_of({"stage": stage}, bf16=bf16))[0]
    engine.backward(loss(engine, 0))
    if engine.global_rank == 1:
        weight = engine.module.blocks[1].up.weight
        with torch.no_grad():
            if by == "data":
                weight.data.zero_()
            else:
                weight.zero_()
    try:
        engine.step()
    except ModelError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("stage", "bf16", "by"), [(0, False, "no_grad"), (1, True, "data"), (2, True, "no_grad")])
def test_what_one_rank_alone_writes_is_refused_on_all(stage: int, bf16: bool, by: str) -> None:
    for error in run_ranks(2, _write_on_one, stage, bf16, by):
        assert "`blocks.1.up.weight` was written to on some ranks" in error


def _open_without_a_name(stage: int, checks: bool, everywhere: bool, moves: bool = False) -> tuple[str, list[float]]:
    settings = settings_of({"stage": stage, "enable_sanity_checks": checks}, bf16=False)
    engine = dsrun.initialize(model=model_of(), config=settings)[0]
    error = ""
    try:
        with dsrun.zero.GatheredParameters(engine.module.blocks.parameters()), torch.no_grad():
            if everywhere or engine.global_rank == 0:
                weight = engine.module.blocks[0].down.weight
                if moves:
                    weight.data = torch.full_like(weight, 0.125)
                else:
                    weight.fill_(0.125)
        engine.backward(loss(engine, 0))
        engine.step()
    except ModelError as refused:
        error = str(refused)
    return error, [float(loss(engine, 1).detach())] if not error else []


@pytest.mark.parametrize("moves", [False, True], ids=["in place", "other memory"])
def test_what_all_ranks_write_in_a_context_without_a_modifier_is_kept_at_every_stage(moves: bool) -> None:
    found = [run_ranks(2, _open_without_a_name, stage, False, True, moves) for stage in (0, 2, 3)]
    assert all(error == "" for ranks in found for error, _ in ranks)
    assert found[0] == found[1] == found[2]


def test_a_shape_that_a_context_without_a_modifier_changes_is_refused() -> None:
    engine = dsrun.initialize(model=model_of(), config=settings_of({"stage": 3}, bf16=False))[0]
    weight = engine.module.head.weight
    with pytest.raises(ModelError, match=r"`head\.weight` has other memory"), dsrun.zero.GatheredParameters(weight):
        weight.data = torch.zeros(3, 3)
    assert weight.shape == (64, 64)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_one_rank_writes_in_a_context_without_a_modifier_is_refused_on_all(stage: int) -> None:
    for error, _ in run_ranks(2, _open_without_a_name, stage, False, False):
        assert "`blocks.0.down.weight` was written to on some ranks" in error
    for error, _ in run_ranks(2, _open_without_a_name, stage, True, False):
        assert "`blocks.0.down.weight` written to without a modifier_rank" in error


def test_an_alias_of_memory_that_others_have_by_now_is_refused() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    model = Leaky()
    model.blocks[0].register_forward_hook(lambda block, *_: model.kept.append(block.weight.data))
    engine = dsrun.initialize(model=model, config=settings_of({"stage": 3}, bf16=False))[0]
    engine.backward(engine(torch.randn(2, 64)))
    model.kept[0].zero_()
    with pytest.raises(ModelError, match=r"`blocks\.0\.weight` was written to by an alias of the memory"):
        engine.step()


def test_a_change_between_forward_and_backward_is_refused_as_in_plain_torch() -> None:
    for place in ({"stage": 0}, {"stage": 3}):
        engine = dsrun.initialize(model=model_of(), config=settings_of(place, bf16=False))[0]
        value = loss(engine, 0)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(value)


def test_a_parameter_that_requires_a_gradient_is_not_changed_in_place_where_torch_records() -> None:
    engine = dsrun.initialize(model=model_of(), config=settings_of({"stage": 3}, bf16=False))[0]
    with pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad .* `head\.weight`"):
        engine.module.head.weight.mul_(0.5)
