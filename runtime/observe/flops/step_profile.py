"""The config's `flops_profiler`: one step's arithmetic and time by module, as one table of the first rank.

In every other step it costs a comparison. In its own, the first rank waits for its device around each module, so that
step is slower, and the other ranks wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from .figures import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string
from .module_profile import ModuleProfile, numel_of, write_lines
from .step_flops import can_observe

_RULE = "-" * 78
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is profiled, and what of it is printed.

    Attributes:
        step: Steps before the one that is profiled; below 0 for none.
        module_depth: Depth of the classes of modules that are shown; -1 for all.
        top_modules: Classes that are shown at each depth.
        detailed: Whether each module is shown.
        output_file: File to write to; None for the standard output.
    """

    step: int
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None


class StepProfile:
    """Profiles one step of an engine, on one rank.

    Args:
        module: The model, or what this rank has of it.
        options: Step that is profiled, and parts of the table; None for no profile.
        facts: Lines about the job for the head of the table, by name: its ranks, its stage.
        peak: FLOP/s that the device can reach; None where it is not known.
        say: Function that tells the user a line.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ProfileOptions | None,
        *,
        facts: Mapping[str, str],
        peak: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._module = module
        self._options = options if options is not None and options.step >= 0 else None
        self._facts = facts
        self._peak = peak
        self._say = say
        self._profile: ModuleProfile | None = None
        self._started_s = 0.0

    def counting(self, step: int) -> AbstractContextManager[Any]:
        """Returns the context of a forward that trains.

        Args:
            step: Steps that were taken before.
        """
        if self._options is None or step != self._options.step:
            return _NOTHING
        if self._profile is None and not self._begin():
            return _NOTHING
        assert self._profile is not None
        return self._profile.counting()

    def forget(self) -> None:
        """Begins the table again, as the global batch that it counted is given up."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.detach()

    def end_step(self, step: int, *, samples: int) -> None:
        """Prints the table at the end of the step that was profiled.

        Args:
            step: Steps that were taken before this one.
            samples: Samples of all ranks in this step.
        """
        if self._options is None or step < self._options.step:
            return
        options, profile = self._options, self._profile
        self._options = self._profile = None
        if profile is None or not profile.counts:
            return  # a run that goes on behind this step, or whose model is compiled
        seconds = time.perf_counter() - self._started_s
        profile.detach()
        lines = [_RULE, *self._summary(profile, options, seconds, samples)]
        lines += profile.aggregated(options.module_depth, options.top_modules)
        lines += [*(profile.table() if options.detailed else ()), _RULE]
        try:
            write_lines(lines, options.output_file)
        except OSError as error:
            self._say(f"flops_profiler: `output_file` cannot be written: {error}; the profile is printed here")
            write_lines(lines, None)

    def _begin(self) -> bool:
        """Puts hooks on the modules; returns whether that was possible."""
        if not can_observe([self._module]):
            self._options = None
            self._say(
                "flops_profiler: the model is compiled, and its modules cannot be told apart: nothing is profiled"
            )
            return False
        self._profile = ModuleProfile(self._module, is_causal_half=True)
        self._profile.attach(counts_calls=False)  # an evaluation within the step is none of it
        self._started_s = time.perf_counter()
        return True

    def _summary(self, profile: ModuleProfile, options: ProfileOptions, seconds: float, samples: int) -> Iterator[str]:
        counts = profile.counts
        forwards = len(counts)
        forward, model, hardware = (
            sum(getattr(count.total, kind) for count in counts) for kind in ("forward", "model", "hardware")
        )
        latency = profile.seconds
        yield f"flops profile of step {options.step + 1}: matrix products, convolutions, attention below its mask"
        entries = [
            *self._facts.items(),
            ("params of this rank's model", params_to_string(numel_of(self._module))),
            ("forwards in the step", str(forwards)),
            ("fwd MACs of a forward", macs_to_string(forward / forwards / 2)),
            ("fwd flops of a forward", number_to_string(forward / forwards)),
            ("fwd+bwd flops of a forward, the model's", number_to_string(model / forwards)),
            ("fwd+bwd flops, with what is computed again", number_to_string(hardware / forwards)),
            ("fwd latency of a forward, with counting", duration_to_string(latency / forwards)),
            ("fwd FLOPS", flops_to_string(forward / latency if latency else 0)),
            ("step latency, from its first forward", duration_to_string(seconds)),
            ("FLOPS of the step, the model's", flops_to_string(model / seconds)),
        ]
        if self._peak is not None:
            entries.append(("share of the device's peak", f"{model / seconds / self._peak:.1%}"))
        entries.append(("samples a second, all ranks", f"{samples / seconds:.4g}"))
        missing = sorted({name for count in counts for name in count.not_counted})
        if missing:
            entries.append(("not counted", ", ".join(missing)))
        for name, value in entries:
            yield f"{name + ':':<46}{value}"
        yield "modules, with the sums of all forwards in the step:"
