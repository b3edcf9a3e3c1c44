"""`OnDevice`: modules built on a device and in a dtype, the meta device mostly. Values come later (`meta.py`)."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch


class OnDevice:
    """A context in which new tensors are made on `device`, floating ones in `dtype` where none is said.

    Args:
        dtype: default of floating tensors.
        device: device of the new tensors; `meta` for shapes alone.
        enabled: False: nothing happens.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._stack.enter_context(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
