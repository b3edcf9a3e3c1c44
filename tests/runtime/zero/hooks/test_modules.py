"""Gradients are those of plain autograd, whatever a model's forward does with its units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

import dsrun
from dsrun.errors import ModelError
from support.inside_engine import hooks_of, store_of
from support.ranks import run_ranks
from support.training import accumulated_gradients, full_parameters, make_engine

WIDTH = 65  # a Linear of this width is a unit outside of blocks, too
STAGES = (0, 1, 2, 3)


def checkpoint(part: Callable[[Tensor], Tensor], x: Tensor, *, use_reentrant: bool) -> Tensor:
    """Recomputes `part`, where there will be a backward; torch warns elsewhere."""
    if not torch.is_grad_enabled():
        return part(x)
    return torch_checkpoint.checkpoint(part, x, use_reentrant=use_reentrant)  # type: ignore[return-value]


class Mlp(nn.Module):
    """A block with a gain that its first operation does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.norm(x)).tanh() * self.gain.sigmoid()


class Base(nn.Module):
    """A stack between an input and an output projection."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.scale)


class HeadFirst(nn.Module):
    """Registers the units in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.inp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (self.blocks[2], self.blocks[0], self.blocks[1]):
            x = block(x)
        return self.out(x)


class Checkpointed(Base):
    """Recomputes segments of blocks; the output projection takes part in the last one."""

    def __init__(self, *, reentrant: bool, every: int) -> None:
        super().__init__()
        self.reentrant, self.every = reentrant, every

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for start in range(0, len(self.blocks), self.every):
            segment = nn.Sequential(*self.blocks[start : start + self.every])
            x = checkpoint(segment, x, use_reentrant=self.reentrant)
        return self.out(x * self.scale)


class CheckpointsInside(Base):
    """Blocks recompute their own inside."""

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


class CheckpointedTwice(Base):
    """One block runs under two reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0], self.blocks[2]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.out(x)


class CalledTwice(Base):
    """Every block is called twice in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.out(x)


class SharesInput(nn.Module):
    """An encoder whose output goes into every decoder block and through it, as in T5."""

    class Decoder(Mlp):
        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x) * memory.sigmoid(), memory

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Mlp() for _ in range(3))
        self.decoder = nn.ModuleList(self.Decoder() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x, memory = block(x, memory)
        return x + memory


class TwoTowers(nn.Module):
    """Two stacks that meet in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Base(3), Base(4)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x) * self.temperature


class LeafInput(Base):
    """The stack's input is a leaf that wants a gradient, as a frozen embedding gives with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x).detach().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.scale)


class InPlace(Base):
    """Blocks change their input in place, first thing."""

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.9))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


@dataclasses.dataclass
class Carried:
    """What blocks hand on, in an object."""

    hidden: Tensor


class CarriesDataclass(Base):
    """Blocks take and return a dataclass."""

    class Block(Mlp):
        def forward(self, carried: Carried) -> Carried:  # type: ignore[override]
            return Carried(super().forward(carried.hidden))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        carried = Carried(self.inp(x))
        for block in self.blocks:
            carried = block(carried)
        return self.out(carried.hidden)


class PartlyFrozen(Base):
    """A block is frozen whole, another in part, and one has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].lin.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.blocks[3].register_parameter("nothing", nn.Parameter(torch.empty(0, 7)))


class LeavesBlocksOut(Base):
    """A block is not called, and the output of another does not reach the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.blocks[1](x)
        for index in (0, 2, 4):
            x = self.blocks[index](x)
        return self.out(x)


class Tied(nn.Module):
    """Input and output projection are one tensor, by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Attention(nn.Module):
    """torch's attention module reads the weights of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 5, batch_first=True)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return x


class ReadsWeight(Base):
    """Reads a unit's weight and not its module."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.inp.weight, self.inp.bias)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.inp(x), self.out.weight)


class CallsParts(Base):
    """Calls the parts of blocks and never a block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block.lin(block.norm(x)) * block.gain  # type: ignore[operator, union-attr]
        return self.out(x * self.scale)


class Scale(torch.autograd.Function):
    """An autograd function of the model's own, which saves a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum((0, 1))


class OwnFunction(Base):
    """Blocks end in an autograd function of the model's own."""

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(super().forward(x), self.gain)  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))


class Adapted(Base):
    """Everything is frozen but low-rank adapters inside of the blocks, as in LoRA; a buffer counts."""

    class Block(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + self.up(self.down(x))

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Base,
    "head first": HeadFirst,
    "checkpoint": lambda: Checkpointed(reentrant=False, every=1),
    "checkpoint, 4 at once": lambda: Checkpointed(reentrant=False, every=4),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True, every=1),
    "reentrant checkpoint, 4 at once": lambda: Checkpointed(reentrant=True, every=4),
    "checkpoint inside": CheckpointsInside,
    "checkpointed twice": CheckpointedTwice,
    "called twice": CalledTwice,
    "shared input": SharesInput,
    "two towers": TwoTowers,
    "leaf input": LeafInput,
    "in place": InPlace,
    "dataclass": CarriesDataclass,
    "partly frozen": PartlyFrozen,
    "blocks left out": LeavesBlocksOut,
    "tied": Tied,
    "attention": Attention,
    "own autograd function": OwnFunction,
    "adapters": Adapted,
    "reads a weight": ReadsWeight,
    "calls parts of blocks": CallsParts,
}


def settings(stage: int, accumulation: int = 2) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def sample(seed: int) -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain_gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """What plain autograd accumulates; zeros where it leaves no gradient."""
    loss(model).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{where}: {name}"


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_two_micro_steps_equal_plain_autograd_at_every_stage(name: str) -> None:
    expected = plain_gradients(build(name), lambda m: m(sample(0)).square().mean() / 2)
    reference = build(name)
    for seed in (0, 1):
        (reference(sample(seed)).square().mean() / 2).backward()
    both = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for stage in STAGES:
        engine = make_engine(settings(stage), model=build(name))
        if stage == 3:
            store_of(engine).poison = True
        engine.backward(engine(sample(0)).square().mean())
        assert_same(accumulated_gradients(engine), expected, f"stage {stage}")
        with torch.no_grad():
            engine(sample(5))
        engine.step()
        engine.backward(engine(sample(1)).square().mean())
        found = accumulated_gradients(engine)
        for key, value in both.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["plain", "reentrant checkpoint", "shared input"])
def test_several_forwards_before_one_backward_and_before_several(stage: int, name: str) -> None:
    together = plain_gradients(build(name), lambda m: (m(sample(0)) * m(sample(1))).mean())
    engine = make_engine(settings(stage, 1), model=build(name))
    engine.backward((engine(sample(0)) * engine(sample(1))).mean())
    assert_same(accumulated_gradients(engine), together, "one backward")

    apart = build(name)
    losses = [apart(sample(seed)).square().mean() for seed in (0, 1)]
    for loss in losses:
        loss.backward()
    engine = make_engine(settings(stage, 1), model=build(name))
    for loss in [engine(sample(seed)).square().mean() for seed in (0, 1)]:
        engine.backward(loss)
    assert_same(accumulated_gradients(engine), {n: p.grad for n, p in apart.named_parameters()}, "two backwards")  # type: ignore[misc]


@pytest.mark.parametrize("stage", STAGES)
def test_a_retained_graph_gives_gradients_again(stage: int) -> None:
    engine = make_engine(settings(stage, 1), model=build("plain"))
    loss = engine(sample(0)).square().mean()
    engine.backward(loss, retain_graph=True)
    once = accumulated_gradients(engine)
    engine.backward(loss)
    assert_same(accumulated_gradients(engine), {name: value * 2 for name, value in once.items()}, "twice")


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_the_script_takes_itself_are_right_and_do_not_count(stage: int) -> None:
    reference = build("plain")
    x = sample(0).requires_grad_()
    expected = torch.autograd.grad(reference(x).square().mean(), x)[0]
    engine = make_engine(settings(stage, 1), model=build("plain"))
    x = sample(0).requires_grad_()
    assert torch.equal(torch.autograd.grad(engine(x).square().mean(), x)[0], expected)
    engine.backward(engine(sample(1)).square().mean())
    assert_same(
        accumulated_gradients(engine), plain_gradients(reference, lambda m: m(sample(1)).square().mean()), "after"
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_scripts_own_zero_grad_does_no_harm(stage: int, set_to_none: bool) -> None:
    losses: list[list[float]] = []
    for own in (False, True):
        engine = make_engine(settings(stage, 1), model=build("called twice"))
        losses.append([])
        for seed in range(4):
            loss = engine(sample(seed)).square().mean()
            if own:
                engine.module.zero_grad(set_to_none=set_to_none)
                engine.optimizer.zero_grad(set_to_none=set_to_none)
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


class ReadsLate(Base):
    """Asks for a weight's dtype, and from its second forward on uses weights of units before and after their calls."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        assert self.out.weight.dtype == torch.float32
        if self.forwards == 1:
            return super().forward(x)
        x = x + nn.functional.linear(x, self.out.weight)
        return super().forward(x) + nn.functional.linear(x, self.inp.weight)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_may_be_read_outside_of_their_module_from_any_step_on(stage: int) -> None:
    torch.manual_seed(3)
    engine = make_engine(settings(stage, 1), model=ReadsLate())
    torch.manual_seed(3)
    plain = ReadsLate()
    for step in range(3):
        plain.zero_grad()
        engine.zero_grad()
        expected = plain_gradients(plain, lambda m, s=step: m(sample(s)).square().mean())  # type: ignore[misc]
        engine.backward(engine(sample(step)).square().mean())
        found = accumulated_gradients(engine)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert not any(driver.calls.anywhere for driver in hooks_of(engine).units._drivers), "dtypes cost no overlap"


def test_weights_that_a_script_reads_from_the_list_of_parameters_get_their_gradients() -> None:
    for stage in STAGES:
        engine = make_engine(settings(stage, 1), model=build("plain"))
        expected = plain_gradients(build("plain"), lambda m: sum(p.square().sum() for p in m.parameters()))  # type: ignore[arg-type, return-value]
        engine.backward(sum(p.square().sum() for p in engine.module.parameters()))
        assert_same(accumulated_gradients(engine), expected, f"stage {stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_is_that_of_plain_autograd_below_stage_3_and_refused_there(stage: int) -> None:
    def penalised(model: nn.Module) -> Tensor:
        x = sample(0).requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()

    engine = make_engine(settings(stage, 1), model=build("plain"))
    for step in range(2):  # from the second step on nobody looks at single gradients
        if stage == 3:
            with pytest.raises(ModelError, match="create_graph=True goes through `out`"):
                penalised(engine)
            engine.backward(engine(sample(1)).square().mean())
            expected = plain_gradients(build("plain"), lambda m: m(sample(1)).square().mean())
            assert_same(accumulated_gradients(engine), expected, "after the refusal")
            return
        expected = plain_gradients(build("plain"), penalised)
        engine.backward(penalised(engine))
        assert_same(accumulated_gradients(engine), expected, f"step {step}")
        engine.zero_grad()


def _evaluate_first(stage: int) -> list[tuple[str, bool]]:
    """Evaluates before the first step, through the engine and past it, and says which outputs were wrong."""
    wrong: list[tuple[str, bool]] = []
    for name in ("plain", "reads a weight", "calls parts of blocks", "tied"):
        engine = make_engine(settings(stage, 1), model=build(name))
        plain = build(name)
        with torch.no_grad():
            for past in (True, False, True):
                x = y = sample(1)
                for _ in range(2):
                    x, y = (engine.module if past else engine)(x), plain(y)
                if not torch.equal(x, y):
                    wrong.append((name, past))
        engine.backward(engine(sample(0)).square().mean())
        engine.step()
    return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_may_be_evaluated_before_its_first_step_with_or_without_the_engine(stage: int) -> None:
    assert run_ranks(2, _evaluate_first, stage) == [[], []]


def test_evaluation_leaves_the_order_of_prefetching_alone() -> None:
    engine = make_engine(settings(3, 1), model=build("plain"))
    gathers: list[int] = []
    for evaluations in (0, 0, 3, 0, 1, 0):
        with torch.no_grad():
            for _ in range(evaluations):
                engine(sample(1)), engine.module(sample(2))
        before = engine.counters()
        engine.backward(engine(sample(0)).square().mean())
        engine.step()
        gathers.append(engine.counters().since(before).collectives.calls["all_gather"])
    order = [unit.name for unit in store_of(engine)._order._recorded]
    there = ["inp", *(f"blocks.{index}" for index in range(5)), "out"]
    assert order == [*there, *reversed(there)]
    assert gathers[3] == gathers[5] == gathers[1], gathers


class Opaque:
    """An object of the script's own."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class CarriesOpaque(Base):
    """Blocks return objects that nobody can look into."""

    class Block(Mlp):
        def forward(self, carried: Opaque) -> Opaque:  # type: ignore[override]
            return Opaque(super().forward(carried.hidden))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](Opaque(x))).hidden


def test_an_output_that_cannot_be_followed_is_refused() -> None:
    engine = make_engine(settings(3, 1), model=CarriesOpaque())
    with pytest.raises(ModelError, match=r"`blocks\.0` returns a Opaque"):
        engine(sample(0))


def test_an_exception_in_a_forward_leaves_the_engine_usable() -> None:
    expected = plain_gradients(build("plain"), lambda m: m(sample(1)).square().mean())
    engine = make_engine(settings(3, 1), model=build("plain"))
    with pytest.raises(RuntimeError, match="shape"):
        engine(torch.randn(3, WIDTH + 1))
    engine.backward(engine(sample(1)).square().mean())
    assert_same(accumulated_gradients(engine), expected, "after")


class Refuses(torch.autograd.Function):
    """Its first backward raises."""

    raises = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if Refuses.raises:
            raise MemoryError("no memory in backward")
        return grad


class RunsOutOfMemory(Base):
    """Raises in the middle of the stack's first backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = Refuses.apply(x)  # type: ignore[assignment]
        return self.out(x * self.scale)


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_a_backward_leaves_the_engine_usable(stage: int) -> None:
    Refuses.raises = False
    torch.manual_seed(3)
    expected = plain_gradients(RunsOutOfMemory(), lambda m: m(sample(1)).square().mean())
    torch.manual_seed(3)
    engine = make_engine(settings(stage, 1), model=RunsOutOfMemory())
    for _ in range(2):
        Refuses.raises = True
        loss = engine(sample(0)).square().mean()
        with pytest.raises(MemoryError, match="no memory"):
            engine.backward(loss)
        engine.zero_grad()
        Refuses.raises = False
        engine.backward(engine(sample(1)).square().mean())
        assert_same(accumulated_gradients(engine), expected, "after")
        engine.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_train_against_each_other(stage: int) -> None:
    """As in a GAN: one engine's loss goes through the other engine's model."""

    def models() -> tuple[nn.Module, nn.Module]:
        return build("plain"), build("shared input")

    maker, judge = models()
    makers, judges = (
        make_engine(settings(stage, 1), model=models()[0]),
        make_engine(settings(stage, 1), model=models()[1]),
    )
    for seed in range(2):
        ours = plain_gradients(maker, lambda m, s=seed: judge(m(sample(s))).square().mean())  # type: ignore[misc]
        makers.backward(judges(makers(sample(seed))).square().mean())
        assert_same(accumulated_gradients(makers), ours, "maker")
        judge.zero_grad()
        theirs = plain_gradients(judge, lambda m, s=seed: m(maker(sample(s)).detach()).square().mean())  # type: ignore[misc]
        judges.backward(judges(makers(sample(seed)).detach()).square().mean())
        assert_same(accumulated_gradients(judges), theirs, "judge")
        maker.zero_grad(), judge.zero_grad()
        makers.zero_grad(), judges.zero_grad()


def _every_model(stage: int) -> dict[str, dict[str, Tensor]]:
    """Two ranks with different samples; the mean over ranks of what each would find alone."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in MODELS:
        engine = make_engine(settings(stage, 1), model=build(name))
        for _ in range(2):
            engine.backward(engine(sample(engine.global_rank)).square().mean())
        found[name] = accumulated_gradients(engine)
        engine.step()
    return found


_ALIKE = pytest.mark.soak("gradients are summed as at stage 0, or scattered as at stage 3; one rank has all stages")


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=_ALIKE), pytest.param(2, marks=_ALIKE), 3])
def test_two_ranks_find_the_mean_gradient_of_every_model(stage: int) -> None:
    first, second = run_ranks(2, _every_model, stage)
    for name in MODELS:
        alone = [plain_gradients(build(name), lambda m, s=s: m(sample(s)).square().mean()) for s in (0, 1)]  # type: ignore[misc]
        expected = {key: alone[0][key] + alone[1][key] for key in alone[0]}  # twice the mean
        assert_same(first[name], expected, name)
        assert_same(second[name], expected, name)


def _leave_out_on_one_rank(stage: int) -> list[dict[str, Tensor]]:
    class Choosy(Base):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                if index != 2 or dsrun_rank() == 0:
                    x = block(x)
            return self.out(x * self.scale)

    torch.manual_seed(3)
    engine = make_engine(settings(stage, 1), model=Choosy())
    found: list[dict[str, Tensor]] = []
    for step in range(3):
        engine.backward(engine(sample(step)).square().mean())
        found.append(accumulated_gradients(engine))
        engine.step()
    return found


def dsrun_rank() -> int:
    return torch.distributed.get_rank()


def test_a_block_that_one_rank_leaves_out_neither_hangs_nor_changes_gradients_below_stage_3() -> None:
    results = [run_ranks(2, _leave_out_on_one_rank, stage) for stage in (0, 1, 2)]
    for ranks in results:
        for step in range(3):
            assert_same(ranks[0][step], ranks[1][step], f"step {step}")
            assert_same(ranks[0][step], results[0][0][step], f"step {step}")
    assert any(value.any() for name, value in results[0][0][0].items() if "blocks.2" in name)


def _other_blocks_on_each_rank() -> None:
    class Experts(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.blocks[dsrun_rank() + 1](self.inp(x)))

    torch.manual_seed(3)
    engine = make_engine(settings(3, 1), model=Experts())
    engine.backward(engine(sample(0)).square().mean())


def _refusal() -> str:
    with pytest.raises(ModelError) as caught:
        _other_blocks_on_each_rank()
    return str(caught.value)


def test_blocks_of_one_size_that_differ_by_rank_are_refused_at_stage_3() -> None:
    for rank, text in enumerate(run_ranks(2, _refusal)):
        assert f"rank {rank} is in all_gather of unit" in text, text
        assert f"while rank {1 - rank} is in all_gather of unit" in text, text


def _reductions(engine: Any) -> int:
    calls = engine.counters().collectives.calls
    return calls["all_reduce"] + calls["reduce_scatter"]


def _without_sync(model: str) -> list[tuple[dict[str, Tensor], int, int]]:
    """At each stage: gradients of three micro steps, two of them in no_sync; reductions in there, and outside."""
    found: list[tuple[dict[str, Tensor], int, int]] = []
    for stage in STAGES:
        engine = make_engine(settings(stage, 1), model=build(model))
        rank = engine.global_rank
        reductions: list[int] = []
        for _ in range(2):  # the second time as in every later step
            engine.zero_grad()
            before = _reductions(engine)
            with engine.no_sync():
                assert not engine.is_gradient_accumulation_boundary()
                for seed in (0, 1):
                    engine.backward(engine(sample(10 * rank + seed)).square().mean())
            inside = _reductions(engine)
            engine.backward(engine(sample(10 * rank + 2)).square().mean())
            reductions = [inside - before, _reductions(engine) - inside]
        found.append((accumulated_gradients(engine), *reductions))
        assert engine.global_steps == 0
        engine.step()
        assert engine.global_steps == 1
    return found


@pytest.mark.parametrize("model", ["plain", "blocks left out"])
def test_no_sync_holds_at_every_stage_and_saves_reductions_where_gradients_are_whole(model: str) -> None:
    ours = run_ranks(2, _without_sync, model)
    plain: dict[str, Tensor] = {}
    for rank in (0, 1):
        for seed in range(3):
            part = plain_gradients(build(model), lambda m, s=10 * rank + seed: m(sample(s)).square().mean())  # type: ignore[misc]
            plain = {key: plain.get(key, torch.zeros(())) + value for key, value in part.items()}
    for found in ours:
        units = found[0][2]
        for stage, (gradients, inside, outside) in enumerate(found):
            for key, value in plain.items():
                torch.testing.assert_close(gradients[key], value / 2, rtol=1e-4, atol=1e-6)
            assert_same(gradients, found[0 if stage < 2 else 2][0], f"stage {stage}")
            assert (inside, outside) == (0 if stage < 2 else 2 * units, units), f"stage {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_takes_gradients_that_no_backward_outside_of_no_sync_has_reduced(stage: int) -> None:
    expected = plain_gradients(build("plain"), lambda m: m(sample(0)).square().mean())
    engine = make_engine({**settings(stage, 1), "gradient_clipping": 0}, model=build("plain"))
    with engine.no_sync():
        engine.backward(engine(sample(0)).square().mean())
    engine.step()
    for name, value in full_parameters(engine).items():
        before = dict(build("plain").named_parameters())[name]
        torch.testing.assert_close(value, before - 0.1 * expected[name])


def test_hooks_come_off_the_model() -> None:
    model = build("plain")
    engine = dsrun.initialize(model=model, config=settings(2))[0]
    engine.destroy()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
