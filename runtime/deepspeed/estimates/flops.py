"""Arithmetic of a model's forward, module by module: `get_model_profile` and `FlopsProfiler` of DeepSpeed's profiler.

[Note: what counts] Multiply-accumulates (MACs) of matrix products, convolutions and attention, by the operations that
torch runs, whoever calls them; flops are twice as many. DeepSpeed 0.19.8 patches torch's functions instead. Its MACs
are the same, and its flops have also one or a few for each element of activations, norms and sums, some percent in all.
It takes attention for whole matrices where a causal kernel computes half of them, and so does this.

Backward is not counted, nor what stands outside of the module that is profiled. Recurrent layers, which torch runs as
one operation that says nothing, are not counted; a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsrun.errors import InputError
from dsrun.log_on_ranks import logger

from ...observe.flops.figures import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from ...observe.flops.module_profile import ModuleProfile, numel_of, write_lines

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_RULE = "-" * 78


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
        self._profile = ModuleProfile(model, is_causal_half=False)

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Starts to count, from zero.

        Args:
            ignore_list: Classes of modules that get no line of their own; what they do counts for what they are in.
        """
        self.stop_profile()
        self.reset_profile()
        self.started = True
        if any(isinstance(module, nn.RNNBase) for module in self.model.modules()):
            logger.warning("flops: what recurrent layers do is not counted")
        self._profile.attach(ignore_list or ())

    def stop_profile(self) -> None:
        """Stops counting; the numbers stay."""
        self._profile.detach()

    def reset_profile(self) -> None:
        """Sets all numbers to zero."""
        self._profile.reset()

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
        flops = self._profile.found(self.model).flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Returns the multiply-accumulates of the module's forward.

        Args:
            as_string: Whether as text, `1.5 GMACs`.
        """
        macs = self._profile.found(self.model).macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Returns the seconds of the module's forward, counting included.

        Args:
            as_string: Whether as text, `1.5 ms`.
        """
        seconds = self._profile.found(self.model).seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Returns the number of the module's parameters, whole ones also where ranks hold slices.

        Args:
            as_string: Whether as text, `1.5 M`.
        """
        params = numel_of(self.model)
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
            module_depth: Depth of the classes that are shown, with those above it; -1: all of them.
            top_modules: Classes that are shown at each depth.
            detailed: Whether each module is shown.
            output_file: File to write to; None: the standard output.
        """
        if not self.started:
            return
        lines = [*self._summary(profile_step), *self._profile.aggregated(module_depth, top_modules)]
        lines += self._profile.table() if detailed else []
        write_lines([_RULE, *lines, _RULE], output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the classes of modules that do most at each depth.

        Args:
            module_depth: Depth that is shown, with those above it; -1: all of them.
            top_modules: Classes that are shown.
        """
        if self.started:
            write_lines(list(self._profile.aggregated(module_depth, top_modules)), None)

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
        missing = sorted({name for count in self._profile.counts for name in count.not_counted})
        if missing:
            entries.append(("not counted", ", ".join(missing)))
        for name, value in entries:
            yield f"{name + ':':<40}{value}"


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
        module_depth: Depth of the classes that are shown, with those above it; -1: all of them.
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


def _input_of(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(shape, tuple) or not shape:  # pyright: ignore[reportUnnecessaryIsInstance]  # of scripts
        raise InputError(f"get_model_profile: input_shape is {shape!r}", hint="give a tuple of sizes")
    param = next(model.parameters(), None)
    return torch.ones(shape) if param is None else torch.ones(shape, dtype=param.dtype, device=param.device)
