"""The model's parts on this rank: cut over the tensor axis as the config or the model's own plan says, or whole.

What a style does stands in `runtime/parallel/tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dsrun.config.config import Config
from dsrun.config.sections.parallel import TensorParallel
from dsrun.errors import ModelError

from ...layout.cuts import NO_CUTS, Cuts
from ...mesh.join.groups import ProcessGroupMesh
from ...parallel.tensor.comparison.first_forward import compare_in_first_forward
from ...parallel.tensor.comparison.regions import kinds_of_regions
from ...parallel.tensor.cut import AXIS, cut_layers, of_first_rank
from ...parallel.tensor.same_inputs import check_inputs_once
from ...parallel.tensor.sources.choose import find_plan
from ...parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ModelPlan
from ...parallel.tensor.survey import Survey
from ...parallel.tensor.vocabulary.hugging_face_loss import cut_loss_of, loss_obstacle
from ...parallel.tensor.vocabulary.part import VocabularyPart, note_vocabulary
from ...stacks import block_prefixes
from ...zero.creation.values import whole_values
from .first_values import draw_meta, is_cut_from_whole

#: Name of the attribute in which a whole model keeps how it will be cut, until its stages are.
_PLANNED = "_dsrun_tensor_plan"

#: Styles; Linears outside of blocks that are cut over the vocabulary, by name; the one that the model's loss works on
#: parts of the logits of.
_Planned = tuple[ModelPlan, Mapping[str, nn.Linear], str | None]


def plan_parts(model: nn.Module, settings: Config, mesh: ProcessGroupMesh) -> None:
    """Finds how a model that will be cut into stages is cut over the tensor axis, while it is whole.

    A stage alone does not show which of its weights other stages use, too: a head and an embedding with one weight are
    cut alike or not at all. And what stands in the way is told on all ranks. Of a list of layers no rank has the whole.

    Args:
        model: model of the script, which keeps what was found until `cut_over_tensor`.
        settings: the config.
        mesh: ranks in their roles.

    Raises:
        ModelError: there is no plan for the model, or a module cannot be cut as it says, by name.
    """
    model.__dict__.pop(_PLANNED, None)  # of a call that failed
    if mesh.spec.size((AXIS,)) == 1 or not is_cut_from_whole(model, settings):
        return
    section = settings.tensor_parallel
    planned = _find(model, section, mesh.tensor.size)
    problems = Survey(model, planned[0], mesh.tensor, exact=section.exact).problems
    if problems:
        raise ModelError.of(problems)
    model.__dict__[_PLANNED] = planned


def cut_over_tensor(model: nn.Module, settings: Config, mesh: ProcessGroupMesh, say: Callable[[str], None]) -> Cuts:
    """Cuts the script's model over the ranks that share each layer, in place; enters broadcasts over them.

    Args:
        model: model of the script, or this rank's stage of it.
        settings: the config; with one rank on the tensor axis the model stays whole.
        mesh: ranks in their roles.
        say: callback that prints a message once for the whole job, on rank 0.

    Returns:
        what became of the parameters that are no plain replicas any more.

    Raises:
        ModelError: there is no plan for the model, or a module cannot be cut as it says, by name.
    """
    axis, section = mesh.tensor, settings.tensor_parallel
    if mesh.spec.size((AXIS,)) == 1:
        return NO_CUTS
    planned: _Planned | None = model.__dict__.pop(_PLANNED, None)
    plan, heads, loss_head = _find(model, section, axis.size) if planned is None else _of_stage(model, planned)
    draw_meta(model, settings, mesh, on_host=settings.zero_optimization.offload_param.device != "none")
    kinds = kinds_of_regions(model, plan, apart=list(filter(None, [loss_head]))) if section.check else []
    cuts = cut_layers(
        model,
        plan,
        axis,
        _values_of(mesh),
        device=mesh.device,
        exact=section.exact,
        slices=section.sequence_parallel,
        overlaps=section.tp_overlap_comm,
    )
    for name, head in heads.items():
        part = _vocabulary_part(head, cuts, mesh, exact=section.exact)
        for param in head.parameters():
            note_vocabulary(param, part)
        if name == loss_head:
            has_cut = cut_loss_of(model, part)
            assert has_cut, "there was no obstacle before it was cut"
    compare_in_first_forward(model, kinds, cuts, axis, source=plan.source, say=say)
    if section.check:
        peers = mesh.spec.peers(mesh.info.rank, mesh.spec.role_axes("tensor"))
        check_inputs_once(model, axis, ranks=peers, device=mesh.device)
    return cuts


def _find(model: nn.Module, section: TensorParallel, size: int) -> _Planned:
    plan = find_plan(model, section, size)
    heads = _output_layers(model, plan)
    loss_head = _head_of_loss(model, heads, section)
    if loss_head is not None:
        plan = replace(plan, modules={**plan.modules, loss_head: COLUMN})
    return plan, heads, loss_head


def _of_stage(model: nn.Module, planned: _Planned) -> _Planned:
    """Returns what was found for the whole model, of the modules that this rank's stage has."""
    plan, heads, loss_head = planned
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owners = {name.rpartition(".")[0] for name in params}
    # A module that another stage alone uses has its place here, and parameters no more.
    there = {name for name, module in model.named_modules() if name in owners or not module._parameters}  # pyright: ignore[reportPrivateUsage]
    own = replace(
        plan,
        modules={name: style for name, style in plan.modules.items() if name in there},
        parameters={name: style for name, style in plan.parameters.items() if name in params},
        attributes={name: attributes for name, attributes in plan.attributes.items() if name in there},
    )
    return own, {name: head for name, head in heads.items() if name in there}, loss_head if loss_head in there else None


def _values_of(mesh: ProcessGroupMesh) -> Callable[[nn.Parameter], Tensor]:
    """Returns what takes a parameter's whole values, wherever they are."""
    replicas, device = mesh.replicas(), mesh.device
    here = of_first_rank(replicas, device)

    def take(param: nn.Parameter) -> Tensor:
        elsewhere = whole_values(param, replicas, device=device)
        return here(param) if elsewhere is None else elsewhere

    return take


def _output_layers(model: nn.Module, plan: ModelPlan) -> dict[str, nn.Linear]:
    """Returns the Linears outside of blocks that are cut over what they give, which is a vocabulary."""
    blocks = block_prefixes(model)
    cut: Mapping[str, nn.Module] = {
        name: model.get_submodule(name)
        for name, style in plan.modules.items()
        if style == GATHERED_COLUMN and not name.startswith(blocks)
    }
    return {name: module for name, module in cut.items() if isinstance(module, nn.Linear)}


def _head_of_loss(model: nn.Module, heads: Mapping[str, nn.Linear], section: TensorParallel) -> str | None:
    """Returns the output layer from parts of whose logits the model can make its loss; None where that cannot be."""
    if section.vocab_parallel_lm_head is False or section.exact or loss_obstacle(model) is not None:
        return None
    own: Any = model
    return next((name for name, head in heads.items() if head is own.get_output_embeddings()), None)


def _vocabulary_part(head: nn.Linear, cuts: Cuts, mesh: ProcessGroupMesh, *, exact: bool) -> VocabularyPart:
    whole = cuts[id(head.weight)].whole
    assert whole is not None, "an output layer is cut"
    (box,) = whole.boxes
    start = box.offset[0]
    return VocabularyPart(mesh.tensor, start, start + box.shape[0], whole.shape[0], exact)
