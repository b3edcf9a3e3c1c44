"""What scripts do with parameters of which each rank has a part: honoured alike on all ranks, or refused by name.

The axis that cuts them is a draft; see `test_second_axis.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import DsrunError, ModelError
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.zero.creation.meta import materialise
from dsrun.runtime.zero.creation.unbuilt import UnbuiltParameters
from dsrun.runtime.zero.params.slotted import SlottedStore
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.tier import ShardTier
from dsrun.runtime.zero.units.unit import ParamUnit
from support.threaded_ranks import ranks_of_threads

CPU = torch.device("cpu")
_AXES = importlib.import_module("dsrun.config.axes")
_ROOT = importlib.import_module("dsrun.runtime.engine.initialize")
NUMEL = 1024
#: Parts of the two ranks: unlike, so that neither is mistaken for the other's.
BOUNDS = (0, 256, NUMEL)


class Gained(nn.Module):
    """A weight that is cut in two, and a gain that both ranks have."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUMEL, device=device))
        self.gain = nn.Parameter(torch.empty(3, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(1.0, 2.0, self.weight.numel()))
            self.gain.fill_(0.5)

    def forward(self, x_BN: Tensor) -> Tensor:
        return (x_BN * self.weight * self.gain.sum() - 1.0).square().sum() / 1000


def cut(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    """Leaves this rank its part of the weight."""
    del settings, say
    assert isinstance(model, Gained)
    start, stop = BOUNDS[mesh.tensor.rank : mesh.tensor.rank + 2]
    model.weight.data = model.weight.detach()[start:stop].clone()
    boxes = TensorBoxes((NUMEL,), (Region((start,), (stop - start,)),))
    return {
        id(model.weight): CutParameter(RankPlacement(cut_over=("second",)), boxes),
        id(model.gain): CutParameter(RankPlacement(summed_over=("second",))),
    }


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are neighbours on an axis that cuts the weight."""
    row = AxisRow("second", "second axis", lambda config: 2, ("replica", "tensor"), cuts=True)
    monkeypatch.setattr(_AXES, "AXES", (*AXES, row))
    monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut,))


def run(
    stage: int,
    body: Callable[[Any, int], Any],
    *,
    make: Callable[[], nn.Module] = Gained,
    size: int = 2,
    params: Callable[[nn.Module], Any] = lambda model: None,
    settings: dict[str, Any] | None = None,
) -> list[Any]:
    """Runs `body` with the engine of each rank; `params` are what the optimizer gets."""
    models = [make() for _ in range(size)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **(settings or {}),
    }

    def rank(collectives: LoopbackCollectives) -> Any:
        model = models[collectives.rank]
        engine: Any = dsrun.initialize(model=model, model_parameters=params(model), config=config)[0]
        try:
            return body(engine, collectives.rank)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as go:
        return LoopbackWorld(size).run(lambda collectives: go(collectives, rank))


def refusal_of(act: Callable[[], object], kind: type[DsrunError]) -> str:
    """Returns what an act is refused with, and the way out."""
    with pytest.raises(kind) as raised:
        act()
    return f"{raised.value}\n{raised.value.hint}"


def nothing(engine: Any, rank: int) -> None:
    del engine, rank


def frozen() -> nn.Module:
    model = Gained()
    model.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_parameter_that_is_cut_is_refused(stage: int) -> None:
    """All ranks would get the first one's part, and it would be saved as the whole."""
    with pytest.raises(ModelError, match=r"`weight` is cut over second, and frozen") as raised:
        run(stage, nothing, make=frozen)
    assert raised.value.hint is not None


@pytest.mark.parametrize("stage", [0, 3])
def test_a_cut_parameter_that_no_optimizer_group_has_is_refused(stage: int) -> None:
    with pytest.raises(ModelError, match=r"`weight` is cut over second, and in no optimizer group"):
        run(stage, nothing, params=lambda model: [model.gain])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_parameter_that_every_rank_has_is_as_ever(stage: int) -> None:
    def make() -> nn.Module:
        model = Gained()
        model.gain.requires_grad_(False)
        return model

    assert run(stage, lambda engine, rank: engine.module.gain.tolist(), make=make) == [[0.5] * 3] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_cut_parameter_whose_values_are_still_to_come_is_refused(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of the module would give every rank the same values, for the first one's part."""
    monkeypatch.setattr(importlib.import_module(__name__), "BOUNDS", (0, NUMEL // 2, NUMEL))
    with pytest.raises(ModelError, match=r"`weight` is cut over second, and its values are not there yet"):
        run(stage, nothing, make=lambda: Gained("meta"))


WHOLE = torch.linspace(1.0, 2.0, NUMEL)


def part_of(values: Tensor, rank: int) -> Tensor:
    return values[BOUNDS[rank % 2] : BOUNDS[rank % 2 + 1]]


def read(*params: nn.Parameter) -> list[Tensor]:
    """Returns what forward reads of parameters on this rank; all ranks call."""
    with dsrun.zero.GatheredParameters(list(params)):
        return [param.detach().clone() for param in params]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_a_context_makes_a_part_whole_and_no_more(stage: int, size: int) -> None:
    """As in DeepSpeed: what another rank of the layer has stays there."""

    def body(engine: Any, rank: int) -> list[Tensor]:
        del rank
        return read(engine.module.weight, engine.module.gain)

    for rank, (weight, gain) in enumerate(run(stage, body, size=size)):
        assert torch.equal(weight, part_of(WHOLE, rank))
        assert gain.tolist() == [0.5] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_data", [True, False])
def test_each_part_has_a_modifier_among_the_ranks_that_have_it(stage: int, size: int, *, by_data: bool) -> None:
    """The last of the ranks with the same part, and no other, gives its values; whichever way they were written."""
    modifier = size // 2 - 1

    def body(engine: Any, rank: int) -> list[Tensor]:
        weight, gain = engine.module.weight, engine.module.gain
        with dsrun.zero.GatheredParameters([weight], modifier_rank=modifier):
            new = part_of(-WHOLE, rank) if rank // 2 == modifier else torch.full_like(weight, torch.nan)
            if by_data:
                weight.data.copy_(new)
            else:
                with torch.no_grad():
                    weight.copy_(new)
        with dsrun.zero.GatheredParameters([gain], modifier_rank=size - 1):
            if rank == size - 1:
                gain.data.fill_(2.0)
        master = dsrun.utils.safe_get_full_fp32_param(weight)
        assert master is not None
        return [master, *read(weight, gain)]

    for rank, (master, weight, gain) in enumerate(run(stage, body, size=size)):
        assert torch.equal(weight, part_of(-WHOLE, rank))
        assert torch.equal(master, weight)
        assert gain.tolist() == [2.0] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_data", [True, False])
def test_new_parts_beside_old_ones_are_refused_on_every_rank(stage: int, size: int, *, by_data: bool) -> None:
    """As where a script writes on the first rank of the job alone."""

    def body(engine: Any, rank: int) -> str:
        weight = engine.module.weight

        def write() -> None:
            with dsrun.zero.GatheredParameters([engine.module.gain, weight], modifier_rank=0):
                handed_out = weight.data
                if rank == 0:
                    (handed_out if by_data else weight.detach()).zero_()

        text = refusal_of(write, ModelError)
        with dsrun.zero.GatheredParameters([weight], modifier_rank=0):
            assert torch.equal(weight.detach(), part_of(WHOLE, rank)), "as it was; and nobody writes"
        dsrun.utils.safe_set_full_fp32_param(weight, part_of(-WHOLE, rank))  # the way out
        assert torch.equal(read(weight)[0], part_of(-WHOLE, rank))
        return text

    for text in run(stage, body, size=size):
        assert "`weight` cut over second, and not each part was written to by its modifier" in text
        assert "safe_set_full_fp32_param" in text


@pytest.mark.parametrize("stage", [0, 3])
def test_a_modifier_that_is_another_rank_for_other_parameters_is_refused(stage: int) -> None:
    def body(engine: Any, rank: int) -> list[str]:
        del rank
        weight, gain = engine.module.weight, engine.module.gain

        def enter(params: list[nn.Parameter], modifier: int) -> Callable[[], object]:
            return dsrun.zero.GatheredParameters(params, modifier_rank=modifier).__enter__

        both, outside = enter([weight, gain], 1), enter([weight], 2)
        return [refusal_of(both, ModelError), refusal_of(outside, ModelError)]

    for both, outside in run(stage, body, size=4):
        assert "other ranks for `weight`, which is cut over second, than for `gain`" in both
        assert "modifier_rank is 2; the ranks are 0 to 1" in outside


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_gradients_and_states_of_a_part_are_whole_over_the_ranks_that_have_it(stage: int) -> None:
    """`safe_get_full_*` and `safe_set_full_*` know parts, as in DeepSpeed: shapes are those of parameters."""

    def body(engine: Any, rank: int) -> dict[str, Tensor]:
        weight = engine.module.weight
        engine.backward(engine(torch.ones(1, weight.numel())))
        grad = dsrun.utils.safe_get_full_grad(weight)
        assert grad is not None
        dsrun.utils.safe_set_full_grad(weight, grad * 2)
        doubled = dsrun.utils.safe_get_full_grad(weight)
        engine.step()
        momentum = dsrun.utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
        assert momentum is not None
        dsrun.utils.safe_set_full_optimizer_state(weight, part_of(WHOLE, rank), "momentum_buffer")
        state = dsrun.utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
        text = refusal_of(lambda: dsrun.utils.safe_set_full_fp32_param(weight, WHOLE), ModelError)
        assert "pass this rank's part" in text
        pieces = dsrun.utils.safe_get_local_fp32_param(weight)
        assert pieces is not None
        assert doubled is not None
        assert state is not None
        return {"grad": grad, "doubled": doubled, "momentum": momentum, "state": state, "local": pieces}

    settings = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, "gradient_clipping": 0.0}
    expected = 1.5 * 2 * (1.5 * WHOLE - 1) / 1000
    for rank, found in enumerate(run(stage, body, size=4, settings=settings)):
        torch.testing.assert_close(found["grad"], part_of(expected, rank))
        assert torch.equal(found["doubled"], found["grad"] * 2)
        assert torch.equal(found["momentum"], found["doubled"])
        assert torch.equal(found["state"], part_of(WHOLE, rank))
        assert found["local"].numel() <= found["grad"].numel() == part_of(WHOLE, rank).numel()


def test_no_method_of_a_module_is_asked_for_the_values_of_a_part() -> None:
    model = Gained("meta")
    boxes = TensorBoxes((2 * NUMEL,), (Region((0,), (NUMEL,)),))
    cuts = {id(model.weight): CutParameter(RankPlacement(("second",)), boxes)}
    with pytest.raises(ModelError, match=r"`weight` is cut over second, and its values are not there yet"):
        materialise(model, UnbuiltParameters(AloneCollectives(), device=CPU), cuts=cuts)
    assert model.gain.is_meta


def test_a_cut_parameter_says_which_part_a_rank_has() -> None:
    """Without boxes, each rank would save its part as the whole."""
    with pytest.raises(AssertionError, match="cut over x and y says which boxes"):
        CutParameter(RankPlacement(cut_over=("x", "y")))
    assert CutParameter(RankPlacement(summed_over=("x",))).whole is None


class OneSizeOnAllRanks(AloneCollectives):
    """Ranks that would make memory together."""

    def zeros(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """No size is one on all ranks."""
        raise AssertionError(f"{numel} elements here, and as many as there are of other parts elsewhere")


@pytest.mark.parametrize("cut_over", [(), ("second",)])
def test_ranks_make_no_slots_together_for_parts_of_unlike_sizes(cut_over: tuple[str, ...]) -> None:
    model = Gained()
    spec = UnitSpec("rest", None, (("weight", model.weight),), placement=RankPlacement(cut_over))
    unit = ParamUnit(spec, AloneCollectives(), index=0)
    unit.tier = cast("ShardTier", object())  # slices that lie in host memory, and are gathered in their slots
    if cut_over:
        SlottedStore([unit], OneSizeOnAllRanks())
    else:
        with pytest.raises(AssertionError, match="elements here"):
            SlottedStore([unit], OneSizeOnAllRanks())
