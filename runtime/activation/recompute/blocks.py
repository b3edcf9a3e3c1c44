"""Hooks that make a model's own blocks recomputed calls, without changing the model: no wrapper, no other names.

Which blocks these are is said here too; what becomes of each, in `activation/choose/policy.py`.

[Note: hooks around a block]
The first hook before a block's forward and the last one after it bracket everything else that belongs to the block:
other hooks, ZeRO's gathers, a compiled forward. The second run calls the module, so all of that happens again, as under
`torch.utils.checkpoint`. Hooks that a script adds later may stand outside of the bracket: their part of the second run
is not listened to, and what one of them makes of the arguments, the first run's own arguments replace.

Contexts of selective recomputation stand closest to the forward instead, behind ZeRO's hooks: what a gather copies is
no operation of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dsrun.errors import ModelError

from ...compat import is_compiled
from ...late_compiler import UncompiledFunction
from ...own_hooks import OwnHook
from ...stacks import Stack, find_stacks
from ..choose.policy import Segment, Treatment
from ..keep.keeper import Keeper
from .call import Chain, RecomputedCall, present_call, running
from .options import CallOptions
from .stash import Stash

BLOCKS_KEY = "activation_checkpointing.blocks"


def choose_stacks(model: nn.Module, patterns: Sequence[str], *, skip: Callable[[nn.Module], bool]) -> list[Stack]:
    """Returns the blocks of `model`.

    Args:
        model: any module.
        patterns: patterns of qualified names, with * and ?; blocks of one parent form a stack. Empty for the blocks
            that `find_stacks` finds.
        skip: modules that are not looked into where there are no patterns.

    Raises:
        ModelError: there is no block, or a pattern matches none.
    """
    found = find_stacks(model, skip=skip)
    known = ", ".join(f"`{stack.name or '(the model)'}` ({len(stack.blocks)} blocks)" for stack in found)
    if not patterns:
        if not found:
            lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
            holder = next((name for name, part in model.named_modules() if name and isinstance(part, lists)), "layers")
            raise ModelError(
                f"`activation_checkpointing`: no stack of blocks was found in {type(model).__name__}",
                hint=f'name its blocks, e.g. "blocks": ["{holder}.*"] in place of `{BLOCKS_KEY}` []',
            )
        return found
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"`{BLOCKS_KEY}` has {pattern!r}, which is the name of no module of {type(model).__name__}",
                hint=f"stacks of blocks in it: {known or 'none'}; * and ? stand for any text",
            )
    chosen: dict[str, list[tuple[str, nn.Module]]] = {}
    taken: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in taken)
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen.setdefault(name.rpartition(".")[0], []).append((name, module))
            taken.append(name)
    return [Stack(parent, tuple(blocks)) for parent, blocks in chosen.items()]


@dataclass(slots=True)
class _Progress:
    """Where a stack's forward is.

    Attributes:
        stack: the stack.
        segments: segments of the stack's blocks, each block in one.
        expected: the block that continues the chain.
        chain: chain of the segment in progress; None for none.
    """

    stack: Stack
    segments: Sequence[Segment]
    expected: int = 0
    chain: Chain | None = None

    def segment_of(self, position: int) -> Segment:
        return next(segment for segment in self.segments if segment.start <= position < segment.stop)

    def chain_for(self, segment: Segment, position: int) -> Chain | None:
        """Returns the chain that a block's call continues or begins; blocks out of order begin one."""
        if segment.stop - segment.start == 1:
            return None
        if position == segment.start or position != self.expected or self.chain is None:
            self.chain = Chain(at_once=segment.at_once)
        self.expected = position + 1
        return self.chain


@dataclass(slots=True)
class _Open:
    """A block whose forward is under way, and what is to be ended after it."""

    module: nn.Module
    surroundings: ExitStack
    ended: Callable[[Any], None] = field(default=lambda output: None)


class BlockHooks:
    """Treats blocks as planned, see [Note: hooks around a block].

    Args:
        stacks: the blocks.
        segments: segments of each stack.
        options: options of recomputed calls.
        selected: options of recomputed calls that keep some of their results.
        keepers: keepers for the treatments that keep a block's saved tensors elsewhere.
        before_pass: callback before the first block of the first stack begins a forward with gradients.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        segments: Sequence[Sequence[Segment]],
        *,
        options: CallOptions,
        selected: CallOptions,
        keepers: dict[Treatment, Keeper],
        before_pass: Callable[[], None],
    ) -> None:
        self._options = options
        self._selected = selected
        self._keepers = keepers
        self._before_pass = before_pass
        self._progress = [_Progress(stack, parts) for stack, parts in zip(stacks, segments, strict=True)]
        self._open: list[_Open] = []
        self._inner: list[tuple[nn.Module, AbstractContextManager[Any]]] = []
        self._handles: list[RemovableHandle] = []
        for progress in self._progress:
            for position, (_, module) in enumerate(progress.stack.blocks):
                self._attach(module, partial(self._before, progress, position))
                if not is_compiled(module):
                    refuse = partial(self._refuse_compiler, progress, position)
                    self._handles.append(module.register_forward_pre_hook(_InCompiledModel(refuse), prepend=True))

    def set_plan(
        self, segments: Sequence[Sequence[Segment]], *, options: CallOptions, keepers: dict[Treatment, Keeper]
    ) -> None:
        """Treats blocks otherwise from the next forward on; backwards that are still to come are not concerned."""
        self._options = options
        self._keepers = keepers
        for progress, parts in zip(self._progress, segments, strict=True):
            progress.segments, progress.chain = parts, None

    def remove(self) -> None:
        """Takes all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _attach(self, module: nn.Module, before: Callable[[nn.Module, Any, Any], Any]) -> None:
        add_before, add_after = module.register_forward_pre_hook, module.register_forward_hook
        self._handles += [
            add_before(OwnHook(before), with_kwargs=True, prepend=True),
            add_after(OwnHook(self._after), with_kwargs=True, always_call=True),
            add_before(OwnHook(self._enter), with_kwargs=True),
            add_after(OwnHook(self._leave), with_kwargs=True, always_call=True, prepend=True),
        ]

    def _refuse_compiler(self, progress: _Progress, position: int) -> None:
        """The code of the model around an uncompiled block is compiled, and the block with it."""
        treatment = progress.segment_of(position).treatment
        if treatment is Treatment.KEEP or not torch.is_grad_enabled() or present_call() is not None:
            return
        raise ModelError(
            f"`activation_checkpointing`: `{progress.stack.blocks[position][0]}` runs inside of a compiled model, and "
            "its second run would not be the compiled one",
            hint="compile each block before dsrun.initialize, block.compile(), and not the model",
        )

    def _before(self, progress: _Progress, position: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        again = _again(module)
        if again is not None:
            again.listens = True
            return again.arguments
        if not torch.is_grad_enabled() or present_call() is not None:
            return None
        if position == 0 and progress is self._progress[0] and not self._open:
            self._before_pass()
        segment = progress.segment_of(position)
        name = progress.stack.blocks[position][0]
        match segment.treatment:
            case Treatment.KEEP:
                return None
            case Treatment.RECOMPUTE | Treatment.SELECT:
                options = self._selected if segment.treatment is Treatment.SELECT else self._options
                chain = progress.chain_for(segment, position)
                call = RecomputedCall(name, module, args, kwargs, options=options, chain=chain)
                opened = _Open(module, ExitStack(), call.end)
                opened.surroundings.enter_context(running(call))
                opened.surroundings.enter_context(call.begin())
            case Treatment.MOVE | Treatment.PACK:
                stash = Stash(self._keepers[segment.treatment], label=name)
                opened = _Open(module, ExitStack(), lambda _: stash.end())
                opened.surroundings.enter_context(stash.begin())
        self._open.append(opened)
        return None

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        again = _again(module)
        if again is not None:
            again.listens = False
        elif self._open and self._open[-1].module is module:
            opened = self._open.pop()
            opened.surroundings.close()
            opened.ended(output)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = present_call()
        if call is not None and call.run is module:
            surroundings = call.surroundings()
            surroundings.__enter__()
            self._inner.append((module, surroundings))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._inner and self._inner[-1][0] is module:
            self._inner.pop()[1].__exit__(None, None, None)


class _InCompiledModel(OwnHook):
    """A hook before a block that calls `refuse` where a compiler traces the block as a part of something else.

    Compilers look into this one, and find the question answered; elsewhere it costs one call.
    """

    __slots__ = ()

    def __new__(cls, refuse: Callable[[], None]) -> _InCompiledModel:
        """Makes it."""
        return partial.__new__(cls, _ask, UncompiledFunction(refuse))


def _ask(refuse: Callable[[], None], module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        refuse()


def _again(module: nn.Module) -> RecomputedCall | None:
    """Returns the module's call under way if it is a second run."""
    call = present_call()
    return call if call is not None and call.run is module and call.has_ended else None
