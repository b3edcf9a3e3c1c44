"""Lets programs that were written for GPUs alone run on the CPU: `torch.cuda` says what the CPU would.

Only what OpenRLHF calls is there. `torch.cuda.is_available()` stays false, and a tensor for a GPU stays an error.
"""

from __future__ import annotations

import torch
import torch.distributed.device_mesh as device_mesh

_make_mesh = device_mesh.init_device_mesh


def _mesh(_: str, shape: tuple[int, ...], **more: object) -> device_mesh.DeviceMesh:
    return _make_mesh("cpu", shape, **more)


def install() -> None:
    """Replaces them in this process, before the program is imported."""
    # One function each: torch's compiler keeps a table of them by identity.
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    device_mesh.init_device_mesh = _mesh
