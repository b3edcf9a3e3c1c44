"""Arithmetic of a model's forward, module by module: `get_model_profile` and `FlopsProfiler` of DeepSpeed's profiler.

[Note: what counts] Multiply-accumulates (MACs) of matrix products, convolutions and attention, by the operations that
torch runs, whoever calls them; flops are twice as many. DeepSpeed 0.19.8 patches torch's functions instead. Its MACs
are the same, and its flops have also one or a few for each element of activations, norms and sums, some percent in all.
It takes attention for whole matrices where a causal kernel computes half of them, and so does this.

Backward is not counted, nor what stands outside of the module that is profiled. Recurrent layers, which torch runs as
one operation that says nothing, are not counted; a warning says so.

[Note: fast path] For evaluation torch runs its own attention and encoder layers as one operation each, which its
counter does not know. So that fast path is off while a forward is counted: the arithmetic is the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dsrun.errors import InputError
from dsrun.log_on_ranks import logger

from ...accelerator import get_accelerator

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_DIGITS = 2
_RULE = "-" * 78
#: Columns of the table: percentages are of the whole model.
_HEADER = ("module", "class", "params", "MACs", "latency", "FLOPS")


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Returns the flops of attention by the shapes of its inputs, heads before lengths; key heads may be shared."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


#: What torch knows no number for.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops  # pyright: ignore[reportPrivateUsage]  # an operation
}


@dataclass(slots=True)
class _Measured:
    """What a module and those in it have done.

    Attributes:
        flops: Floating-point operations.
        seconds: Time.
    """

    flops: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        return self.flops // 2


class FlopsProfiler:
    """Counts what a module's forward does, from `start_profile` to `stop_profile`.

    Args:
        model: Module.
        ds_engine: Engine that trains it; the summary then has the backward too.
        recompute_fwd_factor: Share of the forward that backward computes again.

    Attributes:
        started: Whether numbers are there, until `end_profile`.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._hidden: tuple[type, ...] = ()
        self._handles: list[Any] = []
        self._measured: defaultdict[int, _Measured] = defaultdict(_Measured)
        self._counter: FlopCounterMode | None = None
        self._had_fast_path = True
        self._starts: list[tuple[int, float]] = []

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Starts to count, from zero.

        Args:
            ignore_list: Classes of modules that get no line of their own; what they do counts for what they are in.
        """
        self.stop_profile()
        self.reset_profile()
        self._hidden = tuple(ignore_list or ())
        self.started = True
        if any(isinstance(module, nn.RNNBase) for module in self.model.modules()):
            logger.warning("flops: what recurrent layers do is not counted")
        for module in self.model.modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def stop_profile(self) -> None:
        """Stops counting; the numbers stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_profile(self) -> None:
        """Sets all numbers to zero."""
        self._measured.clear()

    def end_profile(self) -> None:
        """Stops counting and forgets the numbers."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Returns the floating-point operations of the module's forward.

        Args:
            as_string: Whether as text, `1.5 G`.
        """
        flops = self._measured[id(self.model)].flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Returns the multiply-accumulates of the module's forward.

        Args:
            as_string: Whether as text, `1.5 GMACs`.
        """
        macs = self._measured[id(self.model)].macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Returns the seconds of the module's forward, counting included.

        Args:
            as_string: Whether as text, `1.5 ms`.
        """
        seconds = self._measured[id(self.model)].seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Returns the number of the module's parameters, whole ones also where ranks hold slices.

        Args:
            as_string: Whether as text, `1.5 M`.
        """
        params = _numel(self.model)
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the sums, the classes of modules that do most at each depth, and each module.

        Args:
            profile_step: Step that was profiled, for the heading.
            module_depth: Depth of the classes that are shown; -1: the innermost ones.
            top_modules: Classes that are shown at each depth.
            detailed: Whether each module is shown.
            output_file: File to write to; None: the standard output.
        """
        if not self.started:
            return
        lines = [*self._summary(profile_step), *self._aggregated(module_depth, top_modules)]
        lines += self._table() if detailed else []
        _write([_RULE, *lines, _RULE], output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes of modules that do most at each depth.

        Args:
            module_depth: Depth that is shown; -1: the innermost one.
            top_modules: Classes that are shown.
        """
        if self.started:
            _write(list(self._aggregated(module_depth, top_modules)), None)

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        if not self._starts:
            if module is not self.model:
                return  # called by itself, outside of what is profiled
            self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)  # see [Note: fast path]
            self._counter = FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))
            self._counter.__enter__()
        assert self._counter is not None
        get_accelerator().synchronize()
        self._starts.append((self._counter.get_total_flops(), time.perf_counter()))

    def _leave(self, module: nn.Module, _inputs: object, _output: object) -> None:
        if not self._starts:
            return
        assert self._counter is not None
        get_accelerator().synchronize()
        flops, seconds = self._starts.pop()
        found = self._measured[id(module)]
        found.flops += self._counter.get_total_flops() - flops
        found.seconds += time.perf_counter() - seconds
        if not self._starts:
            self._counter.__exit__(None, None, None)
            self._counter = None
            torch.backends.mha.set_fastpath_enabled(self._had_fast_path)

    def _summary(self, step: int) -> Iterator[str]:
        flops, seconds = self.get_total_flops(), self.get_total_duration()
        yield f"dsrun flops profile at step {step}: MACs of matrix products, convolutions and attention"
        entries = [
            ("params per GPU", self.get_total_params(as_string=True)),
            ("fwd MACs per GPU", self.get_total_macs(as_string=True)),
            ("fwd flops per GPU", self.get_total_flops(as_string=True)),
            ("fwd latency, with counting", self.get_total_duration(as_string=True)),
            ("fwd FLOPS per GPU", flops_to_string(flops / seconds if seconds else 0)),
        ]
        if self.ds_engine is not None:
            backward = flops * (2 + self.recompute_fwd_factor)
            entries.append(("bwd flops per GPU, by the forward's", number_to_string(backward)))
            entries.append(("data parallel size", str(self.ds_engine.dp_world_size)))
        for name, value in entries:
            yield f"{name + ':':<40}{value}"

    def _aggregated(self, depth: int, top: int) -> Iterator[str]:
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
            found = self._found(module)
            values = sums[at].setdefault(type(module).__name__, [0, 0, 0])
            for index, value in enumerate((_numel(module), found.macs, found.seconds)):
                values[index] += value
        return sums

    def _table(self) -> Iterator[str]:
        whole, params = self._measured[id(self.model)], _numel(self.model)
        rows: list[tuple[str, ...]] = [_HEADER]
        for name, module in self._shown():
            found = self._found(module)
            rows.append(
                (
                    name or "the model",
                    type(module).__name__,
                    f"{params_to_string(_numel(module))} {_share(_numel(module), params)}",
                    f"{macs_to_string(found.macs)} {_share(found.macs, whole.macs)}",
                    f"{duration_to_string(found.seconds)} {_share(found.seconds, whole.seconds)}",
                    flops_to_string(found.flops / found.seconds if found.seconds else 0),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()

    def _found(self, module: nn.Module) -> _Measured:
        """Returns what a module has done; what those in it have done, where it has no forward, as a ModuleList."""
        if id(module) in self._measured:
            return self._measured[id(module)]
        parts = [self._found(part) for part in module.children()]
        return _Measured(sum(part.flops for part in parts), sum(part.seconds for part in parts))

    def _shown(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for name, module in self.model.named_modules() if type(module) not in self._hidden)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Runs a model without gradients, as for evaluation, and returns what that takes.

    Args:
        model: Model.
        input_shape: Shape of its only input, in the place of `args`.
        args: Inputs.
        kwargs: Inputs by name.
        print_profile: Whether the profile is printed.
        detailed: Whether with each module.
        module_depth: Depth of the classes that are shown; -1: the innermost ones.
        top_modules: Classes that are shown at each depth.
        warm_up: Runs before the one that counts.
        as_string: Whether numbers are text.
        output_file: File to write to; None: the standard output.
        ignore_modules: Classes of modules that get no line of their own.
        mode: `forward`, or `generate` for the model's method of that name.

    Returns:
        flops, MACs and parameters.

    Raises:
        InputError: There is no input, `model` is no module, or there is no such mode.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # of scripts
        raise InputError(f"get_model_profile: model is a {type(model).__name__}", hint="give a torch.nn.Module")
    if mode not in ("forward", "generate"):
        raise InputError(f"get_model_profile: mode is {mode!r}", hint="give `forward` or `generate`")
    if input_shape is not None:
        args = [_input_of(model, input_shape)]
    if not args and not kwargs:
        raise InputError("get_model_profile: there is no input", hint="give input_shape, args or kwargs")
    run: Callable[..., Any] = model if mode == "forward" else model.generate  # pyright: ignore[reportAssignmentType]
    profiler = FlopsProfiler(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                run(*args, **(kwargs or {}))
            profiler.start_profile(ignore_modules)
            run(*args, **(kwargs or {}))
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        model.train(was_training)


def number_to_string(num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns a number with its unit, `1.5 G`.

    Args:
        num: Number.
        units: Unit; None: the largest one that is not larger than the number.
        precision: Digits behind the point.
    """
    if units is None:
        fits = (unit for unit in _UNITS if num >= unit[0])
        size, units = next(fits, _UNITS[-1]) if num else (1.0, "")
    else:
        size = next((size for size, name in _UNITS if name == units), 1.0)
    return f"{round(num / size, precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns multiply-accumulates as text, `1.5 GMACs`; see `number_to_string`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns operations of a second as text, `1.5 GFLOPS`; see `number_to_string`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns bytes as text, `1.5 GB`; see `number_to_string`."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns parameters as text, `1.5 B` for billions; see `number_to_string`."""
    unit = units.replace("B", "G") if units else units
    return number_to_string(params_num, unit, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Returns seconds as text, `1.5 ms`; see `number_to_string`."""
    return f"{number_to_string(duration, units, precision)}s"


def _input_of(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(shape, tuple) or not shape:  # pyright: ignore[reportUnnecessaryIsInstance]  # of scripts
        raise InputError(f"get_model_profile: input_shape is {shape!r}", hint="give a tuple of sizes")
    param = next(model.parameters(), None)
    return torch.ones(shape) if param is None else torch.ones(shape, dtype=param.dtype, device=param.device)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _share(part: float, whole: float) -> str:
    return f"({100 * part / whole if whole else 0:.4g}%)"


def _write(lines: Sequence[str], path: str | None) -> None:
    if not path:
        _print(lines, sys.stdout)
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        _print(lines, file)


def _print(lines: Sequence[str], file: TextIO) -> None:
    print("\n".join(lines), file=file)
