"""First values of a model: rank 0's on every rank, also where pipeline stages keep different layers of it.

Here is what ranks of different stages agree on before and while a model is cut. Ranks of one stage come to one value
where units are built (`zero/creation`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsrun.config.config import Config

from ...layout.cuts import NO_CUTS, Cuts
from ...mesh.collectives import Collectives
from ...mesh.join.groups import ProcessGroupMesh
from ...parallel.pipeline.module import PipelineModule
from ...parallel.pipeline.stages import Stages
from ...zero.creation.meta import has_meta, materialise
from ...zero.creation.unbuilt import UnbuiltOwner, UnbuiltParameters
from ...zero.partition_parameters import home_of, memory_of, set_memory

_LABEL = "first values of pipeline stages"


def is_cut_from_whole(model: nn.Module, settings: Config) -> bool:
    """Whether every rank has been given the whole model, which the engine cuts into pipeline stages.

    Args:
        model: model of the script; a `PipelineModule` has been cut by itself.
        settings: the config.
    """
    return settings.pipeline.stages != "auto" and not isinstance(model, PipelineModule)


def seed_of_first_rank(mesh: ProcessGroupMesh) -> int:
    """Returns the seed of torch's generator on rank 0; a broadcast over the world, which every rank enters.

    Args:
        mesh: all ranks.
    """
    # Seeds have 64 bits and no sign, and tensors that every backend knows have one.
    seed = torch.tensor([_signed(torch.initial_seed())], dtype=torch.int64, device=mesh.device)
    mesh.world.broadcast(seed, source=0, label="seed of the first rank").wait()
    with mesh.world.reading("seed of the first rank"):
        return int(seed.item()) % (1 << 64)


def share_over_stages(model: nn.Module, mesh: ProcessGroupMesh) -> None:
    """Gives the ranks of all stages the first stage's values of a model that is whole; a broadcast a tensor.

    A stage whose ranks drew from seeds of their own, or did not load what rank 0 has loaded, would else begin with
    other layers than rank 0's. What files have promised and what is on the meta device has no values yet. Quantised
    tensors, which no broadcast sends, keep this rank's values: `check_same_everywhere` has found them the same.

    Args:
        model: model that is not cut yet, the same on every rank.
        mesh: ranks in their stages.
    """
    if mesh.pipe.size == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        _share(tensor, mesh.pipe, 0, mesh)


def share_ties(stages: Stages, mesh: ProcessGroupMesh) -> None:
    """Gives every stage that uses a parameter the values of the stage that uses it first; a broadcast a parameter.

    On the meta device each of them has drawn it as the module draws that reads it there. Where it is trained, its unit
    is one of all these stages; where it is frozen, nothing else brings it to one value.

    Args:
        stages: chunks of this rank; each parameter that several chunks use has values, or files have promised them.
        mesh: ranks in their stages.
    """
    # Of several uses on this rank the first one's parameter has the memory, see [Note: uses of a parameter].
    of_chunks = sorted(stages.tied, key=lambda tied: tied.chunk, reverse=True)
    # In one order on all ranks, for a rank may be in several sets of stages.
    for _, tied in sorted({tied.name: tied for tied in of_chunks}.items()):
        users = sorted({stages.rank_of[chunk] for chunk in tied.chunks})
        if len(users) > 1:
            source = users.index(stages.rank_of[tied.chunks[0]])
            _share(tied.param, mesh.ties_over(users), source, mesh)


def draw_meta(
    model: nn.Module, settings: Config, mesh: ProcessGroupMesh, *, on_host: bool, cuts: Cuts = NO_CUTS
) -> None:
    """Gives what a model has on the meta device values that do not depend on the ranks' own seeds; every rank calls.

    Args:
        model: model of the script, or this rank's stage of it.
        settings: the config.
        mesh: ranks in their roles.
        on_host: whether slices of the values live in host memory.
        cuts: parameters that an axis beside data has changed.

    Raises:
        ModelError: naming what no method gives values to, see `materialise`.
    """
    # Of ranks that drew one after the other the first one's values are taken. Stages draw different modules, each from
    # rank 0's seed. One that has nothing on the meta device must say so no less: others wait for it.
    seed = None if settings.pipeline.stages == "auto" else seed_of_first_rank(mesh)
    if has_meta(model):
        nursery = UnbuiltParameters(mesh.replicas(), device=mesh.device, on_host=on_host)
        materialise(model, nursery, cuts=cuts, seed=seed)


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _share(tensor: Tensor, line: Collectives, source: int, mesh: ProcessGroupMesh) -> None:
    """Gives a tensor, or this rank's slice of it, the values that a rank of a line through the stages has."""
    home = home_of(tensor)
    if isinstance(home, UnbuiltOwner):
        if home.nursery.world_size < mesh.world.size:  # else one broadcast has reached all stages
            home.piece = _values_of(source, home.piece, line, mesh)  # on such a line all have one slice
    elif home is None and not tensor.is_meta and not tensor.is_quantized:
        set_memory(tensor, _values_of(source, memory_of(tensor), line, mesh))


def _values_of(source: int, own: Tensor, line: Collectives, mesh: ProcessGroupMesh) -> Tensor:
    """Returns the values of the source, on the device of a rank's own ones."""
    if not own.numel():
        return own
    sent = own.detach().to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    # As bytes, for a backend need not know every dtype (Gloo has no bool).
    line.broadcast(sent.view(-1).view(torch.uint8), source=source, label=_LABEL).wait()
    if line.rank == source:
        return own
    with line.reading(_LABEL):
        return sent.to(own.device)
