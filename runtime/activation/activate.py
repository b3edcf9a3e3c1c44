"""Switches a model's blocks to what the config says, without changing the model; the one place that knows all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from dsrun.config.sections.activation import ActivationCheckpointing, Policy
from dsrun.direct_io.settings import IoSettings
from dsrun.errors import ModelError
from dsrun.pipeline_schedules.live import ONE_AT_A_TIME, LiveMoment
from dsrun.units import format_bytes

from ..compat import compiler_memory_budget, is_compiled
from ..stacks import Stack
from .choose.budget import Solution
from .choose.from_profile import solve_measured
from .choose.policy import Segment, Treatment, plan
from .choose.profile import Profile
from .keep.keeper import AsItIs, Keeper
from .keep.packing import PackingKeeper
from .keep.rings import Rings
from .recompute.blocks import BlockHooks, choose_stacks
from .recompute.options import CallOptions
from .recompute.rng import RngTracker
from .recompute.selective import contexts_for
from .settings import OnItsDevice, keeper_of_inputs

#: Micro steps before figures are taken, and after which they are printed.
_WARM_UP = 1
_PROFILED = 3


class Activations:
    """The blocks of one model, as the config wants them.

    Args:
        section: checked `activation_checkpointing` section of the config.
        stacks: the blocks.
        tracker: tracker of named random generators.
        rings: factory of rings: the keepers for tensors that do not stay on the device.
        say: function that prints a message, on the ranks that print.
        agree: function that turns this rank's measured figures into those for the plan; see `solve_measured`.
        chunk_of: function that returns a block's chunk, by its position among those of this rank.
        moments: function that returns the moments of the schedule that a memory budget must hold at.
    """

    def __init__(
        self,
        section: ActivationCheckpointing,
        stacks: Sequence[Stack],
        *,
        tracker: RngTracker,
        rings: Rings,
        say: Callable[[str], None],
        agree: Callable[[list[float]], list[float]] = list,
        chunk_of: Callable[[nn.Module], int] = lambda _: 0,
        moments: Callable[[], Sequence[LiveMoment]] = lambda: ONE_AT_A_TIME,
    ) -> None:
        self._section = section
        self._stacks = stacks
        self._say = say
        self._agree = agree
        self._chunk_of = chunk_of
        self._moments = moments
        self._passes = 0
        self.policy: Policy = section.chosen_policy
        self.solution: Solution | None = None
        self._profile = Profile() if section.profile or self.policy == "memory_budget" else None
        self._restore: Callable[[], None] | None = None
        self.segments = [self._plan(stack) for stack in stacks]
        self._rings = rings
        self.keeper = keeper_of_inputs(section, None, rings=rings)
        options = CallOptions(
            self.keeper,
            tracker,
            preserve_rng=section.preserve_rng_state,
            synchronize=section.synchronize_checkpoint_boundary,
            observer=self._profile,
        )
        self._options = options
        if self.policy == "compiler":
            self._restore = compiler_memory_budget(section.compiler_budget)
        self._hooks = BlockHooks(
            stacks,
            self.segments,
            options=options,
            selected=replace(options, contexts=contexts_for(section.keep_operations)),
            keepers={},
            before_pass=self._before_pass,
        )

    def remove(self) -> None:
        """Takes everything off the model again."""
        self._hooks.remove()
        if self._restore is not None:
            self._restore()

    def describe(self) -> str:
        """Returns a line on what becomes of the blocks."""
        blocks = sum(len(stack.blocks) for stack in self._stacks)
        treated = sum(s.stop - s.start for parts in self.segments for s in parts if s.treatment is not Treatment.KEEP)
        where = "in host memory" if self._section.cpu_checkpointing else "on the device"
        where = "on disk" if self._section.nvme_path else where
        packed = ", packed to 8 bits" if self._section.packing == "int8" else ""
        return f"activations: policy {self.policy}, {treated} of {blocks} blocks, what is kept {where}{packed}"

    def _plan(self, stack: Stack) -> list[Segment]:
        section, count = self._section, len(stack.blocks)
        for name, module in stack.blocks:
            if self.policy == "selective" and is_compiled(module):
                raise ModelError(
                    f'`activation_checkpointing.policy` is "selective", and `{name}` is compiled, whose operations are '
                    "the compiler's",
                    hint='write "policy": "compiler" with a `compiler_budget`, or do not compile the block',
                )
        if self.policy == "compiler" and not any(is_compiled(module) for _, module in stack.blocks):
            raise ModelError(
                f'`activation_checkpointing.policy` is "compiler", and no block of `{stack.name}` is compiled',
                hint="call block.compile() for each block before dsrun.initialize",
            )
        kept = section.number_checkpoints if section.policy is None else None
        segments = plan(self.policy, count, interval=section.interval, ratio=section.ratio, kept=kept)
        wanted = sum(segment.treatment is not Treatment.KEEP for segment in segments)
        room = section.number_checkpoints
        if section.contiguous_memory_optimization and room is not None and room < wanted:
            raise ModelError(
                f"`activation_checkpointing.number_checkpoints` is {room}; policy {self.policy} keeps {wanted} inputs "
                f"of `{stack.name}`",
                hint=f"set it to {wanted} or more",
            )
        return segments

    def _before_pass(self) -> None:
        """A forward with gradients begins."""
        if self._profile is None:
            return
        self._passes += 1
        figures = self._profile.figures
        if self._passes == _WARM_UP + 1:
            figures.clear()
        names = [name for stack in self._stacks for name, _ in stack.blocks]
        complete = bool(figures) and all(name in figures and figures[name].again_s for name in names)
        if self.policy == "memory_budget" and self.solution is None and self._passes > _WARM_UP + 1 and complete:
            self._solve(names)
        if self._section.profile and self._passes == _PROFILED + 1:
            self._say(f"activations of {len(names)} blocks, {_PROFILED} micro steps\n{self._profile}{self._on_disk()}")
            self._profile = None if self.solution is not None or self.policy != "memory_budget" else self._profile
            if self._profile is None:
                self._options = replace(self._options, observer=None)
                self._hooks.set_plan(self.segments, options=self._options, keepers=self._keepers())

    def _on_disk(self) -> str:
        """Returns a line on what the disk has moved, where something is kept there."""
        if not self._section.nvme_path:
            return ""
        moved = self._rings.counts()
        return (
            f"\non disk: {format_bytes(moved.written_bytes)} written in {moved.write_s:.2f} s, "
            f"{format_bytes(moved.read_bytes)} read in {moved.read_s:.2f} s"
        )

    def _solve(self, names: Sequence[str]) -> None:
        """See from_profile.[Note: measured plans]."""
        assert self._profile is not None, "policy memory_budget measures"
        assert self._section.memory_budget is not None, "checked with the section"
        device = next(p.device for _, m in self._stacks[0].blocks for p in m.parameters())
        figures = [self._profile.figures[name] for name in names]
        budget = self._section.memory_budget
        solution = solve_measured(
            figures,
            budget,
            device=device,
            may_move=self._section.cpu_checkpointing,
            may_pack=self._section.packing == "int8",
            chunks=[self._chunk_of(module) for stack in self._stacks for _, module in stack.blocks],
            moments=self._moments(),
            agree=self._agree,
        )
        self.solution = solution
        chosen = iter(solution.treatments)
        self.segments = [[Segment(i, i + 1, next(chosen)) for i in range(len(s.blocks))] for s in self._stacks]
        if not self._section.profile:
            self._profile = None
            self._options = replace(self._options, observer=None)
        self._hooks.set_plan(self.segments, options=self._options, keepers=self._keepers())
        counts = {kind: solution.treatments.count(kind) for kind in dict.fromkeys(solution.treatments)}
        plan_text = ", ".join(f"{count} {kind.value}" for kind, count in counts.items())
        self._say(
            f"activations: {plan_text}; {format_bytes(solution.peak_bytes)} of {format_bytes(budget)}, "
            f"{solution.seconds * 1e3:.1f} ms a micro step"
        )

    def _keepers(self) -> dict[Treatment, Keeper]:
        return {
            Treatment.MOVE: OnItsDevice(self._rings.ring_of),
            Treatment.PACK: PackingKeeper(AsItIs()),
        }


def activate(
    model: nn.Module,
    section: ActivationCheckpointing,
    *,
    skip: Callable[[nn.Module], bool],
    script_chooses: bool,
    tracker: RngTracker,
    say: Callable[[str], None],
    io: IoSettings | None = None,
    rank: int = 0,
    agree: Callable[[list[float]], list[float]] = list,
    chunk_of: Callable[[nn.Module], int] = lambda _: 0,
    moments: Callable[[], Sequence[LiveMoment]] = lambda: ONE_AT_A_TIME,
) -> Activations | None:
    """Switches the blocks of `model` to what the config says; after all other hooks are in place.

    Args:
        model: the model.
        section: checked `activation_checkpointing` section of the config.
        skip: modules whose inside is no stack.
        script_chooses: the script has configured checkpointing, and calls it itself where no policy is written.
        tracker: tracker of named random generators.
        say: function that prints a message, on the ranks that print.
        io: settings of file reads and writes; None for the defaults of an unset section `aio`.
        rank: rank of this process, for error messages.
        agree: function that turns measured figures into those all ranks plan by; needed if ranks gather parameters for
            blocks that run again.
        chunk_of: function that returns a block's chunk, by its position among those of this rank.
        moments: function that returns the moments of the schedule that a memory budget must hold at.

    Returns:
        None where nothing is asked for.

    Raises:
        ModelError: the model has no blocks, or none that are named so, or the policy does not go with them.
        OffloadError: no file can be made in `nvme_path`.
    """
    if section.chosen_policy == "none" or (section.policy is None and script_chooses):
        return None
    stacks = choose_stacks(model, section.blocks, skip=skip)
    rings = Rings(section, io=io, rank=rank)
    return Activations(
        section, stacks, tracker=tracker, rings=rings, say=say, agree=agree, chunk_of=chunk_of, moments=moments
    )
