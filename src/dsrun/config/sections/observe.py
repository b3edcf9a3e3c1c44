"""Schema of profilers and timers: what a run tells about itself. Trackers: `monitors.py`."""

from typing import Annotated

from dsrun.config.knob import Section, Status, knob, unset
from dsrun.config.values import Count, Flag, Names, NonNegative, Whole

#: Names of collectives that a config may have, DeepSpeed's among them, and what the engine calls each.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "receive": "receive",
    "recv": "receive",
    "irecv": "receive",
}


class CommsLogger(Section):
    """A record of every collective."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Count the engine's collectives, and the waits for them.", users=(2, 1))] = False
    verbose: Annotated[Flag, knob("Print each as it happens, on rank 0.")] = False
    prof_all: Annotated[Flag, knob("Count all kinds.")] = True
    debug: Annotated[Flag, knob("With `verbose`, name the caller of each.")] = False
    prof_ops: Annotated[
        Names,
        knob("Kinds to count, where not all are.", expects="names of collectives, like `all_reduce`"),
    ] = ()

    def kinds(self) -> frozenset[str] | None:
        """Returns the engine's names of the kinds that are counted; None for all."""
        return None if self.prof_all else frozenset(COLLECTIVES[name] for name in self.prof_ops)


class FlopsProfiler(Section):
    """Counts the arithmetic of one step."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[
        Flag, knob("Print a table of one step's arithmetic and time, by module, on the first rank.", users=(4, 3))
    ] = False
    profile_step: Annotated[
        Whole, knob("Steps before the one that is profiled; below 0 profiles none.", unit="steps")
    ] = 1
    module_depth: Annotated[Whole, knob("Depth of modules to show; -1 for all.", unit="levels")] = -1
    top_modules: Annotated[Count, knob("Classes of modules to show per level.", unit="classes")] = 1
    detailed: Annotated[Flag, knob("Show every module.")] = True
    output_file: Annotated[str | None, knob("File to write to, in place of stdout.")] = None
    recompute_fwd_factor: Annotated[
        NonNegative,
        knob(
            "Forward passes that recomputation adds.",
            unit="passes",
            status=Status.NO_MEANING,
            reason="what backward computes again is counted, not assumed",
        ),
    ] = 0.0


class Throughput(Section):
    """Samples per second."""

    default_status = Status.PLANNED
    default_reason = "switch the timer by this key"

    enabled: Annotated[Flag, knob("Measure samples per second.", harmless=True)] = True
    synchronized: Annotated[Flag, knob("Wait for the GPU before reading the clock.", harmless=True)] = True


class Timers(Section):
    """Timers."""

    throughput: Annotated[Throughput, knob("Samples per second.")] = unset(Throughput)
