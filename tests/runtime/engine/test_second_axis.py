"""A second axis of ranks beside data, as a draft adds it: a row of `AXES`, and what cuts a model along it.

No axis but data can be asked for yet. These tests show that the roles of ranks hold: one axis carries samples, the
other one plain replicas, or a model that is cut in two.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.config.axes import AXES, AxisRow
from dsrun.mesh_spec import Role
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.covering import covering
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks as run_processes
from support.threaded_ranks import ranks_of_threads
from support.training import batches

CPU = torch.device("cpu")
_AXES = importlib.import_module("dsrun.config.axes")
_ROOT = importlib.import_module("dsrun.runtime.engine.initialize")
STEPS, MICRO = 2, 2


SAME_SAMPLES: tuple[Role, ...] = ("replica", "tensor")
OWN_SAMPLES: tuple[Role, ...] = ("replica", "batch", "shard", "expert")


def axes_with_second(size: int, cuts: bool = False, roles: tuple[Role, ...] = SAME_SAMPLES) -> tuple[AxisRow, ...]:
    return (*AXES, AxisRow("second", "second axis", lambda config: size, roles, cuts))


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the second axis as wide as asked; its ranks are neighbours, and share samples unless said otherwise."""

    def widen(size: int, cuts: bool = False, roles: tuple[Role, ...] = SAME_SAMPLES) -> None:
        monkeypatch.setattr(_AXES, "AXES", axes_with_second(size, cuts, roles))

    return widen


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }


class Ended:
    """What a rank has at the end: losses and norms of its steps, and the whole weights."""

    def __init__(self, losses: list[float], norms: list[float], weights: dict[str, Tensor]) -> None:
        self.losses, self.norms, self.weights = losses, norms, weights


def train(engine: Any, *, data_rank: int, data_size: int, steps: range) -> tuple[list[float], list[float]]:
    losses: list[float] = []
    norms: list[float] = []
    for step in steps:
        inputs, targets = batches(step, samples=MICRO * 2 * data_size)
        for micro in range(2):
            first = (micro * data_size + data_rank) * MICRO
            loss = loss_of(engine(inputs[first : first + MICRO]), targets[first : first + MICRO])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def gpt() -> nn.Module:
    torch.manual_seed(7)
    return TinyGPT()


def run_ranks(size: int, width: int, body: Callable[[Any, int], Any], stage: int, **more: Any) -> list[Any]:
    """Runs `body` with the engine of each rank, and its place on the data axis."""
    models = [gpt() for _ in range(size)]

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=settings(stage, **more))[0]
        try:
            return body(engine, collectives.rank // width)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as run:
        return LoopbackWorld(size).run(lambda collectives: run(collectives, rank))


def whole(engine: Any) -> dict[str, Tensor]:
    with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def trained(size: int, width: int, stage: int, **more: Any) -> list[Ended]:
    def body(engine: Any, data_rank: int) -> Ended:
        assert engine.dp_world_size == size // width
        assert engine.train_batch_size() == MICRO * 2 * size // width
        losses, norms = train(engine, data_rank=data_rank, data_size=size // width, steps=range(STEPS))
        return Ended(losses, norms, whole(engine))

    return run_ranks(size, width, body, stage, **more)


@functools.cache
def trained_in_pairs(stage: int) -> list[Ended]:
    """What four ranks have at the end, two and two along a second axis that is there already."""
    return trained(4, 2, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_replicas_along_a_second_axis_train_as_without_it(second: Callable[..., None], stage: int) -> None:
    second(1)
    expected = trained(2, 1, stage)
    second(2)
    found = trained_in_pairs(stage)
    zero = trained_in_pairs(0)
    for rank, one in enumerate(found):
        assert one.norms == zero[rank].norms, "the same bits at every stage"
        assert one.norms == found[0].norms, "and on every rank"
        # Replicas of a sample add up before samples do: another order of sums.
        assert one.norms == pytest.approx(expected[0].norms, rel=1e-5)
        assert one.losses == pytest.approx(expected[rank // 2].losses, rel=1e-5)
        assert one.losses == found[rank - rank % 2].losses, "neighbours on the second axis see the same samples"
        for name, value in one.weights.items():
            assert torch.equal(value, zero[rank].weights[name]), name
            torch.testing.assert_close(value, expected[0].weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "sizes"),
    covering(
        {f"zero{stage}": stage for stage in range(4)},
        {f"{size} by {width}": (size, width) for size, width in ((4, 1), (1, 1), (4, 2))},
        together=1,
    ),
)
def test_what_two_by_two_ranks_save_any_number_loads(
    second: Callable[..., None], tmp_path: Any, stage: int, sizes: tuple[int, int]
) -> None:
    size, width = sizes
    second(2)

    def save(engine: Any, data_rank: int) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        train(engine, data_rank=data_rank, data_size=2, steps=range(STEPS))
        assert engine.save_checkpoint(tmp_path, tag="two_by_two")
        return whole(engine), states(engine)

    def load(engine: Any, data_rank: int) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        path, _ = engine.load_checkpoint(tmp_path, tag="two_by_two")
        assert path is not None
        assert engine.global_steps == STEPS
        return whole(engine), states(engine)

    saved = run_ranks(4, 2, save, stage)
    stored = sum(file.stat().st_size for file in (tmp_path / "two_by_two").glob("*.safetensors"))
    numel = sum(param.numel() for param in gpt().parameters())
    assert stored < 1.2 * 3 * 4 * numel, "masters and two states of every element once, not once a replica"
    second(width)
    for weights, found in run_ranks(size, width, load, stage, gradient_accumulation_steps=2):
        for name, value in weights.items():
            assert torch.equal(value, saved[0][0][name]), name
        for role, values in found.items():
            for value, expected in zip(values, saved[0][1][role], strict=True):
                assert torch.equal(value, expected), role


def states(engine: Any) -> dict[str, list[Tensor]]:
    """Whole optimizer states, parameter by parameter; enters collectives."""
    found: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": []}
    for role, values in found.items():
        for param in engine.module.parameters():
            state = dsrun.utils.safe_get_full_optimizer_state(param, role)
            assert state is not None
            values.append(state.clone())
    return found


class Halves(nn.Module):
    """A weight an input, of which a rank may have a half, and a gain that all of them share."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, numel))
        self.gain = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x_BN: Tensor) -> Tensor:
        """The part of the loss that these inputs make."""
        return (x_BN * self.weight * self.gain.sum() - 1.0).square().sum() / 1000


NUMEL = 4096


def cut_in_two(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    """Leaves this rank its half of the weight; all hold the gain, each with a part of its gradient."""
    del settings, say
    assert isinstance(model, Halves)
    peers = mesh.tensor
    half = NUMEL // peers.size
    model.weight.data = model.weight.detach()[peers.rank * half : (peers.rank + 1) * half].clone()
    return {
        id(model.weight): CutParameter(
            RankPlacement(cut_over=("second",)),
            TensorBoxes((NUMEL,), (Region((peers.rank * half,), (half,)),)),
        ),
        id(model.gain): CutParameter(RankPlacement(summed_over=("second",))),
    }


def halves(size: int, width: int, stage: int, steps: int = STEPS, *, save: Any = None, load: Any = None) -> list[Ended]:
    models = [Halves(NUMEL) for _ in range(size)]

    def rank(collectives: LoopbackCollectives) -> Ended:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=settings(stage))[0]
        half = NUMEL // width
        first = collectives.rank % width * half
        norms: list[float] = []
        if load is not None:
            assert engine.load_checkpoint(load, tag="cut")[0] is not None
        for step in range(steps):
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + collectives.rank // width)
                x_BN = torch.randn(MICRO, NUMEL, generator=generator)[:, first : first + half]
                engine.backward(engine(x_BN))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        if save is not None:
            assert engine.save_checkpoint(save, tag="cut")
        weights = {**whole(engine), **{role: values[0] for role, values in states(engine).items()}}
        engine.destroy()
        return Ended([], norms, weights)

    with ranks_of_threads(CPU) as run:
        return LoopbackWorld(size).run(lambda collectives: run(collectives, rank))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_cut_along_a_second_axis_trains_as_the_whole_one(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Every element is counted once in the norm, and a gradient in parts is added up and not averaged."""
    second(1)
    expected = halves(2, 1, stage)
    second(2, cuts=True)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_in_two,))
    found = halves(4, 2, stage)
    for rank, one in enumerate(found):
        assert one.norms == found[0].norms, "the same bits on every rank"
        assert one.norms == pytest.approx(expected[0].norms, rel=1e-6)
        half = expected[0].weights["weight"].view(2, -1)[rank % 2]
        torch.testing.assert_close(one.weights["weight"], half, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.weights["gain"], expected[0].weights["gain"], rtol=1e-5, atol=1e-6)
        assert torch.equal(one.weights["gain"], found[0].weights["gain"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_cut_model_is_saved_as_the_whole_one_and_loads_on_any_ranks(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, stage: int
) -> None:
    second(2, cuts=True)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_in_two,))
    saved = halves(4, 2, stage, save=tmp_path)
    parts = ("weight", "exp_avg", "exp_avg_sq")
    for rank, one in enumerate(halves(2, 2, 3 - stage, 0, load=tmp_path)):
        for name in (*parts, "gain"):
            assert torch.equal(one.weights[name], saved[rank].weights[name]), name
    expected = {name: torch.cat([saved[0].weights[name], saved[1].weights[name]]) for name in parts}
    second(1)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", ())
    for size in (1, 4):
        for one in halves(size, 1, stage, 0, load=tmp_path):
            for name in parts:
                assert torch.equal(one.weights[name], expected[name]), name
            assert torch.equal(one.weights["gain"], saved[0].weights["gain"])


class Part(nn.Module):
    """A weight of which a rank is left the part between two bounds."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, NUMEL))
        self.bounds = start, stop

    def forward(self, x_BN: Tensor) -> Tensor:
        """The part of the loss that this rank's inputs make."""
        return (x_BN[:, slice(*self.bounds)] * self.weight - 1.0).square().sum() / 100


def cut_by_bounds(model: nn.Module, settings: object, mesh: object, say: object) -> Cuts:
    del settings, mesh, say
    assert isinstance(model, Part)
    start, stop = model.bounds
    model.weight.data = model.weight.detach()[start:stop].clone()
    boxes = TensorBoxes((NUMEL,), (Region((start,), (stop - start,)),))
    return {id(model.weight): CutParameter(RankPlacement(cut_over=("second",)), boxes)}


def norms_of_parts(bounds: list[int], stage: int, *, spoil: int = -1, **more: Any) -> list[float]:
    """Norm of a step on each rank, whose parts lie between the bounds; `spoil` has an input that is infinite."""
    models = [Part(start, stop) for start, stop in itertools.pairwise(bounds)]

    def rank(collectives: LoopbackCollectives) -> float:
        x_BN = torch.randn(1, NUMEL, generator=torch.Generator().manual_seed(3))
        if spoil == collectives.rank:
            x_BN.fill_(torch.inf)
        given: dict[str, Any] = {"gradient_accumulation_steps": 1, **more}
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=settings(stage, **given))[0]
        try:
            dtype = engine.module.weight.dtype
            engine.backward(engine(x_BN.to(dtype)).float())
            engine.step()
            return engine.get_global_grad_norm()
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as run:
        return LoopbackWorld(len(models)).run(lambda collectives: run(collectives, rank))


@pytest.mark.parametrize(
    ("split", "stage"),
    covering(
        {"a quarter": NUMEL // 4, "a half": NUMEL // 2, "all but one": NUMEL - 1},
        {f"zero{stage}": stage for stage in (0, 1, 3)},
        together=1,
    ),
)
def test_parts_of_unlike_sizes_have_one_norm_on_every_rank(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, split: int, stage: int
) -> None:
    second(1)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_by_bounds,))
    (expected,) = norms_of_parts([0, NUMEL], stage)
    second(2, cuts=True)
    found = norms_of_parts([0, split, NUMEL], stage)
    assert found[0] == found[1], "clipping by other factors would part the replicas"
    assert found[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "wire"), covering({"zero1": 1, "zero3": 3}, {"wire of the model": None, "fp32": "fp32"}, together=1)
)
def test_gradients_of_parts_go_to_the_host_in_the_dtype_of_all_others(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, stage: int, wire: str | None
) -> None:
    more: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        **({} if wire is None else {"communication_data_type": wire}),
    }
    second(1)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_by_bounds,))
    (expected,) = norms_of_parts([0, NUMEL], stage, **more)
    second(2, cuts=True)
    found = norms_of_parts([0, NUMEL // 2, NUMEL], stage, **more)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_not_finite_in_one_part_is_told_to_all_ranks_by_name(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    second(2, cuts=True)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_by_bounds,))
    found = norms_of_parts([0, NUMEL // 2, NUMEL], stage, spoil=1)
    assert not any(map(math.isfinite, found))
    said = capsys.readouterr().out
    assert "`weight`" in said, "rank 0 names it, though its own part is finite"


class _OfAll(torch.autograd.Function):
    """All ranks' parts of a weight; a part's gradient is the sum of what all ranks' losses want of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Any) -> Tensor:
        """Gathers the parts."""
        ctx.peers = peers
        whole_N = torch.empty(part.numel() * peers.size)
        peers.all_gather(whole_N, part.detach().contiguous()).wait()
        return whole_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Adds up over the ranks."""
        grad_N = grads[0].clone()
        ctx.peers.all_reduce(grad_N).wait()
        return grad_N.chunk(ctx.peers.size)[ctx.peers.rank], None


class Expert(nn.Module):
    """A weight of which each rank has a part, used for the samples of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, NUMEL))
        self.peers: Any = None

    def forward(self, x_BN: Tensor) -> Tensor:
        """A loss of this rank's samples."""
        weight = self.weight if self.peers is None else _OfAll.apply(self.weight, self.peers)
        return (x_BN * weight - 1.0).square().sum() / 1000


def cut_experts(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    del settings, say
    assert isinstance(model, Expert)
    model.peers = peers = mesh.expert
    half = NUMEL // peers.size
    model.weight.data = model.weight.detach()[peers.rank * half : (peers.rank + 1) * half].clone()
    boxes = TensorBoxes((NUMEL,), (Region((peers.rank * half,), (half,)),))
    return {id(model.weight): CutParameter(RankPlacement(cut_over=("second",)), boxes)}


@pytest.mark.parametrize(
    ("more", "stage", "size"),
    covering(
        {"mean": {}, "divided before": {"prescale_gradients": True}, "sum": {"gradient_allreduce_op": "sum"}},
        {f"zero{stage}": stage for stage in range(3)},
        {"2 ranks": 2, "4 ranks": 4},
    ),
)
def test_gradients_of_experts_are_means_over_the_samples_of_all_ranks(
    second: Callable[..., None], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], stage: int, size: int
) -> None:
    def norms() -> list[float]:
        models = [Expert() for _ in range(size)]

        def rank(collectives: LoopbackCollectives) -> float:
            given = settings(stage, gradient_accumulation_steps=1, **more)
            engine: Any = dsrun.initialize(model=models[collectives.rank], config=given)[0]
            engine.backward(engine(torch.randn(1, NUMEL, generator=torch.Generator().manual_seed(collectives.rank))))
            engine.step()
            norm = engine.get_global_grad_norm()
            engine.destroy()
            return norm

        with ranks_of_threads(CPU) as run:
            return LoopbackWorld(size).run(lambda collectives: run(collectives, rank))

    second(1)
    expected = norms()
    second(2, cuts=True, roles=OWN_SAMPLES)
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut_experts,))
    assert norms() == pytest.approx(expected, rel=1e-6)


def test_neighbours_on_a_second_axis_read_the_same_samples_and_a_loss_counts_once(
    second: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    second(2)
    data: Any = list(torch.arange(64.0).view(-1, 1))
    models = [nn.Linear(1, 1) for _ in range(4)]

    def rank(collectives: LoopbackCollectives) -> tuple[list[float], float]:
        given = settings(2, gradient_accumulation_steps=1, steps_per_print=1)
        made: Any = dsrun.initialize(model=models[collectives.rank], config=given, training_data=data)
        engine, _, loader, _ = made
        batch: Tensor = next(iter(loader))
        loss = (engine(batch) * 0).mean() + batch.mean()
        engine.backward(loss)
        engine.step()
        engine.destroy()
        return batch.flatten().tolist(), loss.item()

    with ranks_of_threads(CPU) as run:
        found = LoopbackWorld(4).run(lambda collectives: run(collectives, rank))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not {*found[0][0]} & {*found[2][0]}, "ranks of the data axis have samples of their own"
    assert f"loss {(found[0][1] + found[2][1]) / 2:.4f}" in capsys.readouterr().out


def _train_in_processes(stage: int, width: int) -> tuple[list[float], list[float]]:
    setattr(_AXES, "AXES", axes_with_second(width))  # noqa: B010 - of this process alone
    torch.set_num_threads(1)
    engine: Any = dsrun.initialize(model=gpt(), config=settings(stage))[0]
    return train(
        engine,
        data_rank=engine.global_rank // width,
        data_size=engine.dp_world_size,
        steps=range(STEPS),
    )


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.soak("ZeRO 0 and 3")), 3])
def test_processes_train_along_a_second_axis_as_threads_do(second: Callable[..., None], stage: int) -> None:
    second(2)
    threads = trained_in_pairs(stage)
    for (losses, norms), expected in zip(run_processes(4, _train_in_processes, stage, 2), threads, strict=True):
        assert norms == threads[0].norms
        assert losses == expected.losses
