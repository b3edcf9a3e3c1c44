"""What scripts do with parameters of which each rank has a part: honoured alike on all ranks, or refused by name.

The axis that cuts them is a draft; see `test_second_axis.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import CheckpointError, DsrunError, ModelError
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


def cut(model: nn.Module, settings: object, mesh: Any) -> Cuts:
    """Leaves this rank its part of the weight."""
    del settings
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
) -> list[Any]:
    """Runs `body` with the engine of each rank; `params` are what the optimizer gets."""
    models = [make() for _ in range(size)]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }

    def rank(collectives: LoopbackCollectives) -> Any:
        model = models[collectives.rank]
        engine: Any = dsrun.initialize(model=model, model_parameters=params(model), config=settings)[0]
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_no_rank_gives_all_others_a_cut_parameter(stage: int, size: int) -> None:
    """One rank has a part only; the gain it may give, and parts may be read."""
    whole = torch.linspace(1.0, 2.0, NUMEL)

    def body(engine: Any, rank: int) -> tuple[str, Tensor, Tensor]:
        module = engine.module

        def write() -> None:
            with dsrun.zero.GatheredParameters([module.gain, module.weight], modifier_rank=0):
                module.weight.data.zero_()

        text = refusal_of(write, ModelError)
        with dsrun.zero.GatheredParameters([module.gain], modifier_rank=size - 1):
            if rank == size - 1:
                module.gain.data.fill_(2.0)
        with dsrun.zero.GatheredParameters([module.weight, module.gain]):
            weight, gain = module.weight.detach().clone(), module.gain.detach().clone()
        dsrun.utils.safe_set_full_fp32_param(module.weight, -weight)  # the way out
        with dsrun.zero.GatheredParameters([module.weight]):
            assert torch.equal(module.weight.detach(), -weight)
        return text, weight, gain

    for rank, (text, weight, gain) in enumerate(run(stage, body, size=size)):
        assert "`weight` is cut over second" in text
        assert "safe_set_full_fp32_param" in text
        assert torch.equal(weight, whole[BOUNDS[rank % 2] : BOUNDS[rank % 2 + 1]]), "as it was"
        assert gain.tolist() == [2.0] * 3


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_cut_model_is_not_written_as_a_whole_one(stage: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> list[str]:
        del rank
        return [
            refusal_of(lambda: engine.save_16bit_model(tmp_path, "model.safetensors"), ModelError),
            refusal_of(lambda: engine.save_16bit_model(tmp_path, "model.bin"), ModelError),
            refusal_of(engine.module_state_dict, ModelError),
        ]

    for texts in run(stage, body):
        for text in texts:
            assert "`weight` is cut over second" in text
            assert "`gain`" not in text
            assert "dsrun checkpoint export" in text
        assert "save_16bit_model" in texts[0]
        assert "module_state_dict" in texts[2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("numel", [NUMEL, 256])
def test_one_dict_for_all_ranks_gives_a_cut_parameter_no_values(stage: int, numel: int) -> None:
    values = {"weight": torch.zeros(numel), "gain": torch.ones(3)}

    def body(engine: Any, rank: int) -> tuple[str, list[float]]:
        del rank
        text = refusal_of(lambda: engine.load_module_state_dict(values), CheckpointError)
        engine.load_module_state_dict({"gain": torch.ones(3)}, strict=False)
        with dsrun.zero.GatheredParameters([engine.module.gain]):
            return text, engine.module.gain.tolist()

    for text, gain in run(stage, body):
        assert "`weight` is cut over second" in text
        assert "engine.load_checkpoint" in text
        assert gain == [1.0] * 3


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
