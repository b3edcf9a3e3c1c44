"""Memory of an accelerator that is used on another stream than the one it was allocated on.

An allocator gives memory to whoever asks next on the stream it was allocated on, and takes that stream's order for the
order of all that is done with it. A model that runs parts of a forward on a stream of its own breaks that, and here it
is mended; elsewhere all is on one stream, and nothing is done. The CPU has no streams: None.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def current_stream(device: torch.device) -> Any:
    """Returns the stream on which this thread allocates memory of a device now."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Returns a context in which `stream` is the current one of its device."""
    return nullcontext() if stream is None else torch.get_device_module(stream.device).stream(stream)


def use_here(tensor: Tensor, allocated_on: Any) -> None:
    """Says that the current stream uses a tensor from now on, until it is freed."""
    here = current_stream(tensor.device)
    if here != allocated_on:
        tensor.record_stream(here)
