"""The model's chunks on this rank: cut out of the script's model as the config says, or the model as a whole.

What a chunk is, and how it is run, stands in `runtime/parallel/pipeline`; parameters that chunks share, in `ties.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dsrun.config.config import Config
from dsrun.errors import ModelError

from ...layout.cuts import Cuts
from ...mesh.join.groups import ProcessGroupMesh
from ...parallel.pipeline.cut import cut_model
from ...parallel.pipeline.engine_class import note_stages
from ...parallel.pipeline.layer_list.cut import ranks_of_chunks
from ...parallel.pipeline.module import PipelineModule
from ...parallel.pipeline.pieces import piece_names
from ...parallel.pipeline.stages import Partition, Stages, TiedParameter
from ...zero.units.unit import ParamUnit
from .first_values import share_over_stages
from .parts import plan_parts
from .ties import LocalTies, check_uses, cuts_of


@dataclass(frozen=True, slots=True)
class CutModel:
    """A model in chunks, as its engine holds it.

    Attributes:
        stages: chunks of this rank.
        ties: parameters that several of them use.
        piece_of: name of the piece that each parameter is in, by its name; None: the model is not cut.
        partition: layers of each chunk; None: the model is not cut.
        takes_turns: whether the parameters of a chunk are gathered together, and lie where those of another one do.
    """

    stages: Stages
    ties: LocalTies
    piece_of: Mapping[str, str] | None = None
    partition: Partition | None = None
    takes_turns: bool = False

    def chunks_using(self, units: Sequence[ParamUnit]) -> dict[int, frozenset[int]]:
        """Returns by a unit's index the numbers of this rank's chunks that use it.

        What no chunk says that it has may be used by any.

        Args:
            units: units of this rank's parameters, trained or frozen.
        """
        stages = self.stages
        chunk_of = {
            id(param): chunk for chunk in stages.own for one in stages.modules_of(chunk) for param in one.parameters()
        }
        every = frozenset(stages.own)
        return {
            unit.index: frozenset().union(
                *({chunk_of[id(param)]} if id(param) in chunk_of else every for param in unit.params)
            )
            for unit in units
        }

    def units_of(self, chunk: int, units: Sequence[ParamUnit]) -> list[ParamUnit]:
        """Returns the units that a chunk of this rank alone uses, on this stage and no other.

        Args:
            chunk: number of the chunk.
            units: units of this rank's parameters, trained or frozen.
        """
        turns, own = self.turns_of(units), self.stages.own
        return [unit for unit in units if unit.index in turns and own[turns[unit.index]] == chunk]

    def gather_turns(self, units: Sequence[ParamUnit]) -> dict[int, int] | None:
        """Returns what `turns_of` does where chunks take turns; None where units do, or parameters are always there."""
        return self.turns_of(units) if self.takes_turns else None

    def turns_of(self, units: Sequence[ParamUnit]) -> dict[int, int]:
        """Returns by a unit's index the position of its chunk among those of this rank.

        What several chunks use, here or on other stages, is left out.

        Args:
            units: units of this rank's parameters, trained or frozen.
        """
        own, ties = self.stages.own, self.ties.units
        return {
            unit.index: own.index(*users)
            for unit, users in zip(units, self.chunks_using(units).values(), strict=True)
            if len(users) == 1 and not unit.placement.stages and unit.index not in ties
        }


class WholeModel:
    """A model that is not cut; see `Stages`.

    Args:
        module: model of the script.
    """

    rank_of: tuple[int, ...] = (0,)
    own: tuple[int, ...] = (0,)
    tied: Sequence[TiedParameter] = ()
    needs_batch: bool = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, chunk: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> Any:
        """See `Stages`: the model's own forward."""
        del received
        assert chunk == 0, "a model that is not cut is one chunk"
        return self.module(*args, **kwargs)

    def modules_of(self, chunk: int) -> Sequence[nn.Module]:
        """See `Stages`."""
        assert chunk == 0, "a model that is not cut is one chunk"
        return (self.module,)


def stages_of_script(model: nn.Module) -> int | None:
    """Returns the stages that the script's model has been cut into; None where it is a plain one."""
    return model.num_stages if isinstance(model, PipelineModule) else None


def cut_into_stages(model: nn.Module, settings: Config, mesh: ProcessGroupMesh) -> tuple[Stages, Partition | None]:
    """Cuts the script's model into chunks, of which this rank keeps its own, with rank 0's values.

    Uses of a parameter in several chunks are parameters of their own until `tie_uses`. Enters the broadcasts of
    `share_over_stages`; a list of layers is built of seeds that all ranks have alike.

    Args:
        model: model of the script.
        settings: the config; without `pipeline.stages` the model stays whole.
        mesh: ranks in their stages.

    Returns:
        (chunks, layers of each chunk or None where the model is not cut).

    Raises:
        ModelError: the model cannot be cut, by the name of what stands in the way.
    """
    plan_parts(model, settings, mesh)
    pipe, section = mesh.pipe, settings.pipeline
    if isinstance(model, PipelineModule):
        model.share_layers(mesh.tensor.size)
        stages: Stages = model.stages()
        partition = model.partition()
        _check_interval(model, section.activation_checkpoint_interval)
    elif section.stages == "auto":
        return WholeModel(model), None
    else:
        share_over_stages(model, mesh)
        stages = cut = cut_model(
            model,
            rank=pipe.rank,
            rank_of=ranks_of_chunks(pipe.size, section.chunks_per_rank, _placement(section.schedule_name)),
            partition=section.partition,
        )
        partition = cut.partition
    if settings.fp8.enabled and pipe.size > 1:
        raise ModelError(
            "model: fp8 layers in several pipeline stages are not tested",
            hint="leave `fp8` out, or set `pipeline.stages` to 1",
        )
    return stages, partition


def tie_uses(
    stages: Stages, partition: Partition | None, settings: Config, mesh: ProcessGroupMesh, parts: Cuts
) -> tuple[CutModel, Cuts]:
    """Makes one parameter of all uses that this rank has of it; enters the collectives of `check_uses`.

    Args:
        stages: chunks of this rank.
        partition: layers of each chunk; None: the model is not cut.
        settings: the config.
        mesh: ranks in their stages.
        parts: parameters that an axis beside data has changed.

    Returns:
        (the model in chunks, all parameters that are no plain replicas).

    Raises:
        ModelError: naming a parameter that is not cut alike wherever it is used.
    """
    cuts = cuts_of(stages, parts)
    check_uses(stages, cuts, mesh)
    sums_apart = settings.reduces_once_an_update or mesh.replicas().size == 1
    ties = LocalTies.of(stages, is_shared=settings.cutting_stage == 3 or not sums_apart)
    if partition is None:
        return CutModel(stages, ties), cuts
    return CutModel(stages, ties, piece_names(stages.module), partition, settings.gathers_chunks), cuts


def note_class(engine: object, chunks: CutModel) -> None:
    """Has `isinstance(engine, PipelineEngine)` be true where it would be of DeepSpeed's engine.

    Args:
        engine: engine of the model.
        chunks: chunks of the model.
    """
    module = chunks.stages.module
    if isinstance(module, PipelineModule):
        note_stages(engine)


def _placement(schedule: str) -> str:
    return "v" if schedule == "zbv" else "loop"


def _check_interval(module: PipelineModule, interval: int) -> None:
    """Refuses a list of layers and a config that both recompute layers."""
    own = module.activation_checkpoint_interval
    if interval and own:
        raise ModelError(
            f"model: PipelineModule recomputes every {own} layers, and `pipeline.activation_checkpoint_interval` is "
            f"{interval}",
            hint="say it in one of the two places",
        )
