"""Cuts a plain model with one stack of blocks into chunks for pipeline stages. How one runs: `plain_model`.

[Note: ends of a model]
What is outside of the stack belongs to the first chunk where it is used before the blocks, to the last one where it is
used behind them, and to the chunk of the block before it where it is used between blocks; see [Note: dry run]. A
parameter that both ends use (an embedding that is the head too) is two parameters of the same values, one for each end,
even where one chunk has both ends: then sums of gradients have the same bits wherever the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dsrun.errors import ModelError, Problem

from ...stacks import AbsentBlock, Stack, find_stacks
from ..twins import twin_of
from .plain_model.cost import partition_of
from .plain_model.running import ChunkRunner, CutStack, HollowSlot, OutsideGroup, SecondUse
from .plain_model.stand_ins import Shape
from .plain_model.uses import Slot, Uses, find_uses, phases_of, slots_of, takes
from .stages import Partition, TiedParameter

_ALONE = "set `pipeline.stages` to 1, or write the model as a PipelineModule"
#: Name of the module of the model that has second uses of parameters on one rank.
SECOND_USES = "second_uses"
#: What models collect over all blocks, where a script or the model's config asks for it.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True, slots=True)
class _End:
    """A use of a parameter outside of the stack.

    Attributes:
        chunk: chunk that it is in.
        is_behind: whether it is behind the last block.
    """

    chunk: int
    is_behind: bool


class ModelStages:
    """Chunks of a plain model that this rank has; a `Stages`.

    Args:
        module: model, cut.
        rank_of: rank of each chunk.
        own: chunks of this rank.
        tied: parameters that more than one end uses.
        partition: blocks of each chunk.
        runner: runner of single chunks.
        modules: modules of each own chunk.

    Attributes:
        module: model, cut.
        rank_of: rank of each chunk.
        own: chunks of this rank.
        tied: parameters that more than one end uses.
        needs_batch: True; masks and positions are made on each rank.
        partition: blocks of each chunk.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rank_of: tuple[int, ...],
        own: tuple[int, ...],
        tied: Sequence[TiedParameter],
        partition: Partition,
        runner: ChunkRunner,
        modules: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        self.module = module
        self.rank_of = rank_of
        self.own = own
        self.tied = tied
        self.needs_batch = True
        self.partition = partition
        self._runner = runner
        self._modules = modules

    def run(self, chunk: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any) -> Any:
        """See `Stages`.

        Args:
            chunk: number of the chunk.
            args: positional arguments of the model's forward.
            kwargs: keyword arguments of the model's forward.
            received: value that the chunk before has returned.

        Raises:
            ModelError: the model is asked for what is collected over all blocks, or cannot be cut where it is.
        """
        several = len(self.rank_of) > 1
        given = dict(kwargs)
        if several:
            _refuse_collected(self.module, given)
        if takes(self.module, "use_cache") and (several or self.module.training):
            given.setdefault("use_cache", False)
        return self._runner.run(chunk, args, given, received)

    def modules_of(self, chunk: int) -> Sequence[nn.Module]:
        """See `Stages`.

        Args:
            chunk: number of the chunk.
        """
        return self._modules[chunk]


def cut_model(
    model: nn.Module,
    *,
    rank: int,
    rank_of: Sequence[int],
    partition: str | Sequence[int] = "cost",
    sequence_length: int = 2048,
) -> ModelStages:
    """Cuts a model in place: this rank keeps the parameters of its own chunks, under their names.

    Every rank calls, with the same model, on any device; meta among them. Values are only read, where a parameter that
    two ends use becomes two on one rank.

    Args:
        model: whole model, which has one stack of blocks.
        rank: number of this rank along the pipe axis.
        rank_of: rank of each chunk.
        partition: `cost`, `parameters`, `uniform`, `type:REGEX` of blocks' classes, or first block of each chunk and
            the number of blocks.
        sequence_length: tokens of a sequence, which attention's cost goes by.

    Raises:
        ModelError: the model cannot be cut, by the name of what stands in the way.
        InputError: bounds or pattern do not fit the blocks.
    """
    chunks = len(rank_of)
    stack = _stack_of(model, chunks)
    slots = slots_of(model, stack)
    uses = find_uses(model, stack, slots)
    if uses.reached and uses.order != list(range(len(uses.order))):
        names = ", ".join(stack.blocks[number][0] for number in uses.order[:8])
        raise ModelError(
            f"model: its forward calls blocks of `{stack.name}` in the order {names}; pipeline stages need each one to "
            "be called once, in order",
            hint=_ALONE,
        )
    found = partition_of(stack, slots, uses, chunks, partition, sequence_length)
    ends = _ends(stack, slots, uses, found.bounds)
    if chunks > 1:
        _refuse_shared(stack, slots, found)
    own = tuple(chunk for chunk, owner in enumerate(rank_of) if owner == rank)
    return _Cut(model, stack, slots, ends, found, tuple(rank_of), own).stages()


def _stack_of(model: nn.Module, chunks: int) -> Stack:
    stacks = find_stacks(model, skip=lambda module: False)
    if len(stacks) != 1:
        names = ", ".join(f"`{stack.name or 'the model itself'}`" for stack in stacks)
        held = f"several stacks of blocks ({names})" if stacks else "no stack of blocks"
        raise ModelError(f"model: a {type(model).__name__} has {held}; pipeline stages are cut in one", hint=_ALONE)
    stack = stacks[0]
    if len(stack.blocks) < chunks:
        raise ModelError(
            f"model: `{stack.name}` has {len(stack.blocks)} blocks for {chunks} chunks; expected one for each at least",
            hint="set fewer `pipeline.stages` or `pipeline.virtual_stages`",
        )
    return stack


def _ends(stack: Stack, slots: Sequence[Slot], uses: Uses, bounds: Sequence[int]) -> dict[str, tuple[_End, ...]]:
    """Returns the uses of each place outside of the stack, by its name, in order."""
    chunks, count = len(bounds) - 1, len(stack.blocks)
    chunk_of = [chunk for chunk in range(chunks) for _ in range(bounds[chunk], bounds[chunk + 1])]
    ends: dict[str, tuple[_End, ...]] = {}
    problems: list[Problem] = []
    for slot in slots:
        found: dict[_End, None] = {}
        for phase in sorted(phases_of(stack, slot, uses)):
            found[_End(chunk_of[max(0, phase - 1)], phase == count)] = None
        if len({end.chunk for end in found}) > 1 and len(found) != len({end.is_behind for end in found}):
            problems.append(
                Problem(f"model: `{slot.name}` is used between blocks of `{stack.name}` in several chunks", _ALONE)
            )
        ends[slot.name] = tuple(found)
    if problems:
        raise ModelError.of(problems)
    return ends


def _refuse_shared(stack: Stack, slots: Sequence[Slot], partition: Partition) -> None:
    """Refuses parameters that blocks of several chunks have in common, or a block and something outside."""
    owner: dict[int, tuple[str, int]] = {id(slot.param): (slot.name, -1) for slot in slots}
    for chunk in range(len(partition.bounds) - 1):
        for number in partition.layers_of(chunk):
            block_name, block = stack.blocks[number]
            for name, param in block.named_parameters():
                first, of_chunk = owner.setdefault(id(param), (f"{block_name}.{name}", chunk))
                if of_chunk != chunk:
                    raise ModelError(
                        f"model: `{first}` and `{block_name}.{name}` are one parameter, in several pipeline stages; "
                        "only what is outside of the stack may be used on both sides of it",
                        hint=_ALONE,
                    )


class _Cut:
    """One model, being cut on one rank."""

    def __init__(
        self,
        model: nn.Module,
        stack: Stack,
        slots: Sequence[Slot],
        ends: Mapping[str, tuple[_End, ...]],
        partition: Partition,
        rank_of: tuple[int, ...],
        own: tuple[int, ...],
    ) -> None:
        self._model = model
        self._stack = stack
        self._slots = slots
        self._ends = ends
        self._partition = partition
        self._rank_of = rank_of
        self._own = own
        self._homes: dict[str, int | None] = {}
        self._hollow: list[HollowSlot] = []
        self._second: list[SecondUse] = []
        self._tied: list[TiedParameter] = []
        self._modules: dict[int, list[nn.Module]] = {chunk: [] for chunk in own}

    def stages(self) -> ModelStages:
        """Cuts, and returns the chunks of this rank."""
        keys = tuple(name.rpartition(".")[2] for name, _ in self._stack.blocks)
        container = self._model.get_submodule(self._stack.name)
        looks = tuple(twin_of(block, with_tensors=False) for _, block in self._stack.blocks)
        stack = CutStack(container, keys, self._partition.names, looks, self._partition.bounds)
        self._place_slots()
        groups = self._groups()
        self._leave_blocks(stack)
        self._share_out(groups)
        self._share_out_buffers(groups)
        runner = ChunkRunner(self._model, stack, groups, self._hollow, self._second)
        return ModelStages(
            self._model,
            rank_of=self._rank_of,
            own=self._own,
            tied=tuple(self._tied),
            partition=self._partition,
            runner=runner,
            modules=self._modules,
        )

    def _place_slots(self) -> None:
        """Gives each end that this rank has parameters of its own, and empties the places of other ends."""
        uses: dict[int, list[tuple[Slot, _End]]] = {}
        for slot in self._slots:
            for end in self._ends[slot.name]:
                uses.setdefault(id(slot.param), []).append((slot, end))
        second = nn.Module()
        for places in uses.values():
            original = places[0][0].param
            ends = sorted({end for _, end in places}, key=lambda end: (end.is_behind, end.chunk))
            own = [end for end in ends if end.chunk in self._own]
            params = {end: original if number == 0 else _copy_of(original) for number, end in enumerate(own)}
            for slot in dict.fromkeys(slot for slot, _ in places):
                of_slot = [end for end in own if end in self._ends[slot.name]]
                self._fill(slot, original, [(end, params[end]) for end in of_slot], second)
            if len(ends) > 1:
                chunks = tuple(sorted({end.chunk for end in ends}))
                self._tied += [TiedParameter(places[0][0].name, params[end], end.chunk, chunks) for end in own]
        if any(True for _ in second.parameters()):
            self._model.add_module(SECOND_USES, second)

    def _fill(
        self, slot: Slot, original: nn.Parameter, own: Sequence[tuple[_End, nn.Parameter]], second: nn.Module
    ) -> None:
        """Puts the parameter of a place's first own end there, and those of further ones beside."""
        home = own[0][0].chunk if own else None
        self._homes[slot.name] = home
        places = _params(slot.owner)
        places[slot.attribute] = own[0][1] if own else None
        shape = Shape(tuple(original.shape), original.dtype)
        self._hollow.append(HollowSlot(slot.name, slot.owner, slot.attribute, shape, home))
        for end, param in own[1:]:
            assert end.is_behind, "a place has one use before the end of the stack"
            held_as = slot.name.replace(".", "-")
            holder = nn.Module()
            holder.register_parameter("param", param)
            second.add_module(held_as, holder)
            self._second.append(SecondUse(slot.owner, slot.attribute, holder, "param"))
            self._modules[end.chunk].append(holder)

    def _groups(self) -> list[OutsideGroup]:
        """Returns the outermost modules outside of the stack whose parameters are all of one chunk."""
        blocks = {id(block) for _, block in self._stack.blocks}
        parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for parent in self._model.modules():
            for name, child in _children(parent).items():
                if child is not None:
                    parents.setdefault(id(child), []).append((parent, name))
        homes: dict[int, set[int | None]] = {}
        for slot in self._slots:
            homes.setdefault(id(slot.owner), set()).add(self._homes[slot.name])
        groups: dict[int, OutsideGroup] = {}

        def look(module: nn.Module) -> None:
            if id(module) in blocks or id(module) in groups or module is getattr(self._model, SECOND_USES, None):
                return
            parts = list(module.modules())
            of_parts = set[int | None]().union(*(homes.get(id(part), set()) for part in parts))
            is_around = module is self._model or any(id(part) in blocks for part in parts)
            if not is_around and len(of_parts) == 1:
                groups[id(module)] = OutsideGroup(module, tuple(parents[id(module)]), next(iter(of_parts)))
            elif of_parts or is_around:
                for child in module.children():
                    look(child)

        look(self._model)
        return list(groups.values())

    def _leave_blocks(self, stack: CutStack) -> None:
        children = _children(stack.container)
        own = {number for chunk in self._own for number in self._partition.layers_of(chunk)}
        for number, (key, (_, block)) in enumerate(zip(stack.keys, self._stack.blocks, strict=True)):
            if number not in own:
                children[key] = AbsentBlock.of(block)

    def _share_out(self, groups: Sequence[OutsideGroup]) -> None:
        """Notes which modules each chunk of this rank has."""
        grouped = {id(part) for group in groups for part in group.module.modules()}
        for chunk in self._own:
            names = [self._partition.names[number] for number in self._partition.layers_of(chunk)]
            blocks = [self._model.get_submodule(name) for name in names]
            loose = nn.ParameterList(
                _params(slot.owner)[slot.attribute]
                for slot in self._slots
                if id(slot.owner) not in grouped and self._homes[slot.name] == chunk
            )
            outside = [group.module for group in groups if group.home == chunk]
            self._modules[chunk] = [*blocks, *outside, *self._modules[chunk], *([loose] if len(loose) else [])]

    def _share_out_buffers(self, groups: Sequence[OutsideGroup]) -> None:
        """Has one chunk save each buffer outside of the stack: that of its module's parameters, or else the first one.

        Raises:
            ModelError: a module without parameters counts what goes through it, which is not known on every rank.
        """
        homes = {id(part): group.home for group in groups for part in group.module.modules()}
        inside = {id(part) for _, block in self._stack.blocks for part in block.modules()}
        for name, module in self._model.named_modules():
            if id(module) in inside or not module._buffers:  # pyright: ignore[reportPrivateUsage]
                continue
            is_counting = isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None  # pyright: ignore[reportPrivateUsage]
            if id(module) not in homes and is_counting and len(set(self._rank_of)) > 1:
                raise ModelError(
                    f"model: `{name}` keeps running statistics and has no parameters, so no pipeline stage is its home",
                    hint="give it affine=True, or put it into a block",
                )
            if homes.get(id(module), 0) not in self._own:  # None is the home of what other ranks have
                module._non_persistent_buffers_set.update(module._buffers)  # pyright: ignore[reportPrivateUsage]


def _refuse_collected(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    config = getattr(model, "config", None)
    for name in _COLLECTED:
        source = "the call" if name in kwargs else "the model's config"
        if kwargs.get(name, getattr(config, name, False)):
            raise ModelError(
                f"model: `{name}` is set in {source}; what is collected over all blocks is not gathered from pipeline "
                "stages",
                hint=f"set `{name}` to False, or `pipeline.stages` to 1",
            )
    for name in ("use_cache", "past_key_values"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ModelError(
                f"model: `{name}` is given; pipeline stages keep no cache of keys and values",
                hint=f"leave `{name}` out",
            )


def _copy_of(param: nn.Parameter) -> nn.Parameter:
    values = param.detach()
    if param.is_meta or param.untyped_storage().nbytes() >= param.numel() * param.element_size():
        values = values.clone()
    # Else the parameter is a slice on each rank, which its units know: there are no values here to copy.
    return nn.Parameter(values, requires_grad=param.requires_grad)


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules  # pyright: ignore[reportPrivateUsage]


def _params(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]
