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

from ...mesh.join.groups import ProcessGroupMesh
from ...optim.groups import GroupAssignment
from ...parallel.pipeline.cut import cut_model
from ...parallel.pipeline.engine_class import note_stages
from ...parallel.pipeline.layer_list.cut import ranks_of_chunks
from ...parallel.pipeline.module import PipelineModule
from ...parallel.pipeline.pieces import piece_numbers
from ...parallel.pipeline.stages import Partition, Stages, TiedParameter
from ...zero.units.cuts import Cuts
from .ties import LocalTies, cuts_of


@dataclass(frozen=True, slots=True)
class CutModel:
    """A model in chunks, as its engine holds it.

    Attributes:
        stages: chunks of this rank.
        ties: parameters that several of them use.
        piece_of: number of the piece that each parameter is in, by its name; None: the model is not cut.
        partition: layers of each chunk; None: the model is not cut.
    """

    stages: Stages
    ties: LocalTies
    piece_of: Mapping[str, int] | None = None
    partition: Partition | None = None


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


def cut_into_stages(
    model: nn.Module, assignment: GroupAssignment, settings: Config, mesh: ProcessGroupMesh
) -> tuple[CutModel, Cuts, GroupAssignment]:
    """Cuts the script's model into chunks, of which this rank keeps its own; enters no collective.

    Args:
        model: model of the script.
        assignment: optimizer groups of its parameters.
        settings: the config; without `pipeline.stages` the model stays whole.
        mesh: ranks in their stages.

    Returns:
        (chunks, parameters that several stages use, optimizer groups of this rank's parameters).

    Raises:
        ModelError: the model cannot be cut, by the name of what stands in the way.
    """
    pipe, section = mesh.pipe, settings.pipeline
    names = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    if isinstance(model, PipelineModule):
        stages: Stages = model.stages()
        partition = model.partition()
        _check_interval(model, section.activation_checkpoint_interval)
    elif section.stages == "auto":
        return CutModel(WholeModel(model), LocalTies([])), {}, assignment
    else:
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
    group_of = dict(assignment.group_of)
    for tied in stages.tied:
        first = group_of.get(names.get(tied.name, 0))
        if first is not None:
            group_of.setdefault(id(tied.param), first)
    ties = LocalTies.of(stages, is_sharded=settings.zero_optimization.stage == 3)
    chunks = CutModel(stages, ties, piece_numbers(stages.module), partition)
    return chunks, cuts_of(stages), GroupAssignment(group_of, assignment.options)


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
