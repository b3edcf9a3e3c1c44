"""What each module of a model does in its forwards: FLOPs and seconds, by hooks that are there while it is asked for.

Time is measured with the device waited for around each module, so a forward takes longer than it does otherwise.

[Note: fast path] For evaluation torch runs its own attention and encoder layers as one operation each, which no table
has. So that fast path is off while a forward is counted: the arithmetic is the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import nn

from ...compat import in_backward
from .counter import FlopCount, FlopCounter
from .figures import duration_to_string, flops_to_string, macs_to_string, params_to_string

#: Columns of the table: percentages are of the whole model.
_HEADER = ("module", "class", "params", "MACs", "latency", "FLOPS")


@dataclass(slots=True)
class Measured:
    """What a module and those in it have done.

    Attributes:
        flops: Floating-point operations.
        seconds: Time.
    """

    flops: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        """Multiply-accumulates: two floating-point operations each."""
        return self.flops // 2


class ModuleProfile:
    """FLOPs and seconds of a module's forwards, and of each module in it.

    Attributes:
        counts: Count of each forward of the whole, with its backward.
        seconds: Time of these forwards.

    Args:
        model: Module.
        is_causal_half: Whether of a causal mask only the pairs that it leaves count.
    """

    def __init__(self, model: nn.Module, *, is_causal_half: bool) -> None:
        self.counts: list[FlopCount] = []
        self.seconds = 0.0
        self._model = model
        self._is_causal_half = is_causal_half
        self._hidden: tuple[type, ...] = ()
        self._counts_calls = True
        self._handles: list[Any] = []
        self._measured: defaultdict[int, Measured] = defaultdict(Measured)
        self._counter: FlopCounter | None = None
        self._root: Any = None
        self._starts: list[tuple[int, float]] = []

    def attach(self, hidden: Sequence[type] = (), *, counts_calls: bool = True) -> None:
        """Puts hooks on the modules.

        Args:
            hidden: Classes of modules that get no line of their own; what they do counts for what they are in.
            counts_calls: Whether a call of the whole model counts by itself, and not inside of `counting` alone.
        """
        self._hidden = tuple(hidden)
        self._counts_calls = counts_calls
        for module in self._model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def detach(self) -> None:
        """Takes the hooks off; the numbers stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Sets all numbers to zero."""
        self._measured.clear()
        self.counts.clear()
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Inside, what runs is counted; a call of the whole model counts by itself, see `attach`."""
        had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # see [Note: fast path]
        self._counter = counter = FlopCounter(is_causal_half=self._is_causal_half)
        self._starts.clear()
        _wait_for_device()
        started_s = time.perf_counter()
        try:
            with counter:
                yield
            _wait_for_device()
            self.seconds += time.perf_counter() - started_s
        finally:
            self._counter = None
            torch.backends.mha.set_fastpath_enabled(had_fast_path)
            self.counts.append(counter.count())

    def found(self, module: nn.Module) -> Measured:
        """Returns what a module has done; what those in it have done, where it has no forward, as a ModuleList."""
        if id(module) in self._measured:
            return self._measured[id(module)]
        parts = [self.found(part) for part in module.children()]
        return Measured(sum(part.flops for part in parts), sum(part.seconds for part in parts))

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        if in_backward():
            return  # a block that runs again
        if self._counter is None:
            if module is not self._model or not self._counts_calls:
                return  # called by itself, outside of what is profiled
            self._root = self.counting()
            self._root.__enter__()
        assert self._counter is not None
        _wait_for_device()
        self._starts.append((self._counter.forward, time.perf_counter()))

    def _leave(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if self._counter is None or not self._starts or in_backward():
            return
        _wait_for_device()
        flops, seconds = self._starts.pop()
        found = self._measured[id(module)]
        found.flops += self._counter.forward - flops
        found.seconds += time.perf_counter() - seconds
        if not self._starts and self._root is not None:
            root, self._root = self._root, None
            root.__exit__(None, None, None)

    def aggregated(self, depth: int, top: int) -> Iterator[str]:
        """Yields lines with the classes of modules that do most at each depth.

        Args:
            depth: Depth that is shown, with those above it; -1: all of them.
            top: Classes that are shown at each depth.
        """
        sums = self._by_depth()
        if depth >= len(sums) or depth < -1:
            yield f"there is no depth {depth}; the innermost one is {len(sums) - 1}"
        chosen = range(len(sums)) if depth == -1 else range(min(depth + 1, len(sums)))
        for at in chosen:
            yield f"depth {at}:"
            for name, index, text in (
                ("params", 0, params_to_string),
                ("MACs", 1, macs_to_string),
                ("fwd latency", 2, duration_to_string),
            ):
                most = sorted(sums[at].items(), key=lambda item: -item[1][index])[:top]
                shown = ", ".join(f"{kind} {text(values[index])}" for kind, values in most)
                yield f"    {name:<12}- {shown}"

    def _by_depth(self) -> list[dict[str, list[float]]]:
        """Returns params, MACs and seconds of each class of modules, by depth."""
        sums: list[dict[str, list[float]]] = []
        for name, module in self._shown():
            at = name.count(".") + 1 if name else 0
            while len(sums) <= at:
                sums.append({})
            found = self.found(module)
            values = sums[at].setdefault(type(module).__name__, [0, 0, 0])
            for index, value in enumerate((numel_of(module), found.macs, found.seconds)):
                values[index] += value
        return sums

    def table(self) -> Iterator[str]:
        """Yields a line for each module."""
        whole, params = self.found(self._model), numel_of(self._model)
        rows: list[tuple[str, ...]] = [_HEADER]
        for name, module in self._shown():
            found = self.found(module)
            rows.append(
                (
                    name or "the model",
                    type(module).__name__,
                    f"{params_to_string(numel_of(module))} {_share(numel_of(module), params)}",
                    f"{macs_to_string(found.macs)} {_share(found.macs, whole.macs)}",
                    f"{duration_to_string(found.seconds)} {_share(found.seconds, whole.seconds)}",
                    flops_to_string(found.flops / found.seconds if found.seconds else 0),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()

    def _shown(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self._model.named_modules() if type(module) not in self._hidden)


def numel_of(module: nn.Module) -> int:
    """Returns the number of a module's parameters, whole ones also where ranks hold slices."""
    return sum(param.numel() for param in module.parameters())


def _share(part: float, whole: float) -> str:
    return f"({100 * part / whole if whole else 0:.4g}%)"


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def write_lines(lines: Sequence[str], path: str | None) -> None:
    """Writes lines to a file, whose folder is made; without one, to the standard output.

    Args:
        lines: Lines.
        path: File; None or empty for the standard output.

    Raises:
        OSError: The file cannot be written.
    """
    if not path:
        _print(lines, sys.stdout)
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        _print(lines, file)


def _print(lines: Sequence[str], file: TextIO) -> None:
    print("\n".join(lines), file=file)
