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

from ...layout.cuts import NO_CUTS, Cuts
from ...mesh.join.groups import ProcessGroupMesh
from ...parallel.tensor.comparison.first_forward import compare_in_first_forward
from ...parallel.tensor.comparison.regions import kinds_of_regions
from ...parallel.tensor.cut import AXIS, cut_layers, of_first_rank
from ...parallel.tensor.same_inputs import check_inputs_once
from ...parallel.tensor.sources.choose import find_plan
from ...parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ModelPlan
from ...parallel.tensor.vocabulary.hugging_face_loss import cut_loss_of, loss_obstacle
from ...parallel.tensor.vocabulary.part import VocabularyPart, note_vocabulary
from ...stacks import block_prefixes
from ...zero.creation.meta import has_meta, materialise
from ...zero.creation.unbuilt import UnbuiltParameters
from ...zero.creation.values import whole_values


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
    plan = find_plan(model, section, axis.size)
    if has_meta(model):
        on_host = settings.zero_optimization.offload_param.device != "none"
        materialise(model, UnbuiltParameters(mesh.replicas(), device=mesh.device, on_host=on_host))
    heads = _output_layers(model, plan)
    loss_head = _head_of_loss(model, heads, section)
    if loss_head is not None:
        plan = replace(plan, modules={**plan.modules, loss_head: COLUMN})
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
