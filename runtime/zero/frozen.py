"""Parameters that are not trained, and buffers: whole on every rank, in the compute dtype, with rank 0's values.

They belong to no unit: nothing here has a gradient, a master or optimizer state.
"""

from __future__ import annotations

import torch
from torch import nn

from ..mesh.collectives import Collectives
from ..precision.policy import PrecisionPolicy
from .partition_parameters import home_of
from .seeds import SeedHome
from .stored import StoredHome


def place_frozen(
    model: nn.Module, collectives: Collectives, *, precision: PrecisionPolicy, device: torch.device
) -> None:
    """Brings frozen parameters and buffers to `device`, floating ones in compute dtype, with rank 0's values.

    Enters one broadcast a tensor.
    """
    tensors = [param for param in model.parameters() if not param.requires_grad]
    for param in tensors:
        home = home_of(param)
        if isinstance(home, SeedHome):
            param.data = home.nursery.give(home)
        elif isinstance(home, StoredHome):
            values = home.stored.read(0, param.numel()).view(param.shape)
            home.keep(device)
            param.data = values.to(device)
    for tensor in [*tensors, *model.buffers()]:
        dtype = precision.compute if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(device=device, dtype=dtype)
        if tensor.numel():
            flat = tensor.data.contiguous().view(-1)
            # As bytes, for a backend need not know every dtype (Gloo has no bool).
            collectives.broadcast(flat.view(torch.uint8), source=0, of="frozen tensors").wait()
            tensor.data = flat.view(tensor.shape)
