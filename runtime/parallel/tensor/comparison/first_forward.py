"""Whether a plan is right, looked at in the first forward: parts of the model are run cut and whole, and compared.

A plan that forgets a sum or cuts the wrong dim trains to a worse loss, and nothing says so. So the first time that a
region is called (see `regions.py`), it is run twice in fp32 with the very arguments that it was given: cut as it is,
and whole with the gathered weights. Outputs, gradients of inputs and gradients of all its parameters must agree.

[Note: what is compared]
Weights are the model's with random numbers added, see [Note: weights of a comparison]. Both runs are in evaluation, so
dropout draws nothing, and what random numbers are drawn is put back. The gradient of the outputs is random, the same on
all ranks. Gradients that the plan says are parts are summed, as the engine will. Ranks agree on what they have found:
each difference is the largest of all ranks, so all raise, or none.

[Note: nothing goes uncompared]
A module whose plan is compared carries a guard until it has run in a comparison. Most run in the first one of their
region. One that did not (cross attention that comes later, an expert without tokens) has the region compared again when
it is called. A region that is never called itself is compared by the regions inside of it, and a module that is called
outside of all regions ends the run. Where a region cannot be run alone, that is told. A forward without gradients shows
less, so the first one with gradients is compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsrun.errors import DsrunError, ModelError
from dsrun.units import format_list

from ....compat import forward_hooks, forward_pre_hooks
from ....late_compiler import UncompiledFunction
from ....layout.cuts import CutParameter, Cuts
from ....mesh.collectives import Collectives
from ....own_hooks import OwnHook
from ...twins import twin_of
from ..fronts import with_front
from ..modules import cut_state_of
from ..sequence.blocks import gets_slices, on_whole_sequences
from ..sequence.operators import join_sequence, with_hidden
from .differences import differences
from .regions import Kind, is_inside, name_inside
from .runs import Call, Run, aside, gradient_of, run_forward, with_weights
from .weights import leaf, names_of, part_of_whole, whole_of, with_noise

_COMPARISON = "_dsrun_tensor_comparison"
_HINT = (
    'say how its layers are cut in `tensor_parallel.partition_config`, with "partition_type": "skip" for what stays '
    'whole, and "shape" for what stands side by side in one weight (queries, keys and values; none where they stand '
    "head by head); a column needs a row behind it. docs/guides/tensor.md has an example"
)
#: Differences that a message names.
_MOST_ERRORS = 6


@dataclass(frozen=True, slots=True)
class _Terms:
    """What is the same for all regions.

    Attributes:
        source: source of the plan.
        axis: ranks of the tensor axis.
        cuts: changes to the model's parameters.
        say: callback that prints a message once for the whole job.
    """

    source: str
    axis: Collectives
    cuts: Cuts
    say: Callable[[str], None]


@dataclass(slots=True)
class _Region:
    """One module that is compared when it is called.

    Attributes:
        name: qualified name.
        module: the module.
        own: class of the module before it waited.
        cuts: changes to its parameters, by their names in it.
        whole: twin of it before it was cut.
        cut: twin of it as it is cut, which takes and returns whole sequences.
        open: names in it of the modules whose plan is compared.
        kind: all of its kind.
        terms: values that are the same for all regions.
        look: function that compares the region at the begin of a call of it.
        running: calls of it that run.
    """

    name: str
    module: nn.Module
    own: type[Any]
    cuts: Mapping[str, CutParameter]
    whole: nn.Module
    cut: nn.Module
    open: Sequence[str]
    kind: _Pending
    terms: _Terms
    look: Callable[[Call], None] = field(init=False)
    running: list[Call] = field(default_factory=list[Call])

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model is compared by nobody."""

    def __post_init__(self) -> None:
        """Hides the comparison from compilers."""
        self.look = UncompiledFunction(self._look)

    def _look(self, call: Call) -> None:
        """Compares at the begin of a call, unless that has been done and this call shows no more.

        Raises:
            ModelError: naming the region, and what differs in it by how much.
        """
        if not self.kind.is_final:
            has_gradients = call.has_gradients()
            if has_gradients or not self.kind.seen:
                self.compare(call, has_gradients=has_gradients)
        self.kind.end_if_done()

    def compare(self, call: Call, *, has_gradients: bool) -> None:
        """Compares, and lets go of what ran.

        Args:
            call: arguments of the region's call.
            has_gradients: whether its results may be trained by.
        """
        device = next(self.module.parameters()).device
        with aside(device):
            failure, ran = _compare(self, call, device)
        if failure:
            self.kind.give_up(self.name, failure, self.terms.say)
        else:
            if not self.kind.is_final:
                self._tell_hooks()
            self.kind.note(ran, has_gradients=has_gradients)

    def _tell_hooks(self) -> None:
        """Says which modules have forward hooks of the script, which no twin has."""
        hooked = [
            f"`{'.'.join(filter(None, (self.name, name)))}`"
            for name, part in self.module.named_modules()
            if any(map(_is_scripts, [*forward_pre_hooks(part), *forward_hooks(part)]))
        ]
        if hooked:
            self.terms.say(
                f"tensor parallelism: forward hooks of {format_list(hooked, 3)} see this rank's part where the "
                "layer is cut; what they change is not compared with the whole"
            )


@dataclass(slots=True)
class _Pending:
    """A kind of regions of which something has not been compared yet, or not in a forward with gradients.

    Attributes:
        regions: the regions.
        inner: kinds inside of them, by their names in these.
        guards: guards of the modules that are compared here and in no inner region, by their names in a region.
        seen: names of the modules that have run in a comparison without gradients.
        is_final: whether a forward with gradients has been compared.
        cannot_run: whether its regions cannot be run alone.
    """

    regions: list[_Region]
    inner: dict[str, _Pending]
    guards: dict[str, list[RemovableHandle]]
    seen: set[str] = field(default_factory=set[str])
    is_final: bool = False
    cannot_run: bool = False

    def note(self, ran: Collection[str], *, has_gradients: bool) -> None:
        """Notes what has been compared.

        Args:
            ran: names of the modules that ran, in a region.
            has_gradients: whether gradients of all inputs were.
        """
        self.is_final |= has_gradients
        self.seen.update(ran)
        for name in self.guards.keys() & set(ran) if has_gradients else ():
            self._let_go(name)
        for part, one in self.inner.items():
            inside = [name_inside(name, part) for name in ran if is_inside(name, part)]
            if inside:
                one.note(inside, has_gradients=has_gradients)
        self.end_if_done()

    def end_if_done(self) -> None:
        """Has the regions be as they were, where nothing is left to be compared."""
        if self.is_final and not self.waits():
            self._end()

    def waits(self) -> bool:
        """Whether some module has not been compared."""
        return bool(self.guards) or any(one.waits() for one in self.inner.values())

    def give_up(self, name: str, failure: str, say: Callable[[str], None]) -> None:
        """Says that a region cannot be compared; those inside of it still can.

        Args:
            name: qualified name of the region.
            failure: error of its forward.
            say: callback that prints a message once for the whole job.
        """
        self.cannot_run = True
        what = "its parts are compared in its place" if self.inner else "its plan is not checked"
        for guarded in list(self.guards):
            self._let_go(guarded)
        self._end()
        say(f"tensor parallelism: `{name}` cannot be run alone ({failure}); {what}")

    def _let_go(self, name: str) -> None:
        for guard in self.guards.pop(name):
            guard.remove()

    def _end(self) -> None:
        for region in self.regions:
            if region.module.__dict__.pop(_COMPARISON, None) is not None:
                region.module.__class__ = region.own


class _Compared:
    """Stands before the class of a region; behind the hooks around it, so that the weights are there."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region: _Region | None = self.__dict__.get(_COMPARISON)
        if region is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        call = Call(args, kwargs)
        region.look(call)
        region.running.append(call)
        try:
            return region.own.forward(self, *args, **kwargs)
        finally:
            region.running.pop()


def compare_in_first_forward(
    model: nn.Module,
    kinds: Sequence[Kind],
    cuts: Cuts,
    axis: Collectives,
    *,
    source: str,
    say: Callable[[str], None],
) -> None:
    """Has regions be compared with what they were when they are first called; every rank must call.

    Args:
        model: model that has been cut.
        kinds: its regions before they were cut, see `kinds_of_regions`.
        cuts: changes to the model's parameters.
        axis: ranks of the tensor axis.
        source: source of the plan, as messages name it.
        say: callback that prints a message once for the whole job.
    """
    terms = _Terms(source, axis, cuts, say)
    # All twins first: that of a region that waits would wait too.
    for pending in [_pending(model, kind, terms) for kind in kinds]:
        _wait(pending)


def _pending(model: nn.Module, kind: Kind, terms: _Terms, around: Sequence[_Region] = ()) -> _Pending:
    """Returns regions of a kind, and those inside of them.

    Args:
        model: model that has been cut.
        kind: the kind.
        terms: values that are the same for all regions.
        around: regions that each of these is in; none for the outer ones.
    """
    pending = _Pending([], {}, {})
    for name, whole in zip(kind.names, kind.wholes, strict=True):
        module = model.get_submodule(name)
        twin = on_whole_sequences(twin_of(module, with_tensors=True), terms.axis)
        cuts = {key: terms.cuts[id(param)] for key, param in module.named_parameters() if id(param) in terms.cuts}
        pending.regions.append(_Region(name, module, type(module), cuts, whole, twin, kind.open, pending, terms))
    for number, region in enumerate(pending.regions):
        outwards = [region, *around[number : number + 1]]
        for part in kind.alone:
            module = region.module.get_submodule(part)
            guard = OwnHook(partial(_guard, part, outwards))
            pending.guards.setdefault(part, []).append(module.register_forward_pre_hook(guard))
    for one in kind.inner:
        part = name_inside(one.names[0], kind.names[0])
        pending.inner[part] = _pending(model, one, terms, pending.regions)
    return pending


def _wait(pending: _Pending) -> None:
    for region in pending.regions:
        setattr(region.module, _COMPARISON, region)
        region.module.__class__ = with_front(_Compared, type(region.module))
    for one in pending.inner.values():
        _wait(one)


def _guard(name: str, regions: Sequence[_Region], module: nn.Module, args: object) -> None:
    """Has a module be compared before it runs for the first time.

    Args:
        name: name of the module in the first region.
        regions: regions that it is in, innermost first.
        module: the module.
        args: its arguments.
    """
    kind = regions[0].kind
    running = [region for region in regions if region.running and not region.kind.cannot_run]
    for region in reversed(running):
        call = region.running[-1]
        has_gradients = call.has_gradients()
        if name in kind.seen and not has_gradients:
            return
        region.compare(call, has_gradients=has_gradients)
        if name not in kind.guards or name in kind.seen:
            return
    inner = regions[0]
    full = ".".join(filter(None, (inner.name, name)))
    reason = (
        "a run of these alone does not call it"
        if running
        else "none of the modules around it that hold its column and its row is called itself"
    )
    raise ModelError(
        f"model: `{full}` ({type(module).__name__}) is cut (plan of {inner.terms.source}), and is called where its "
        f"plan cannot be compared: {reason}",
        hint='call the block, or the module of the layers, and not their parts; `"check": false` in `tensor_parallel` '
        "believes the plan",
    )


def _compare(region: _Region, call: Call, device: torch.device) -> tuple[str, list[str]]:
    """Compares a region with the whole one; returns why it cannot be, or nothing, and the modules that ran.

    Args:
        region: the region.
        call: arguments that it is called with.
        device: device of its parameters.

    Raises:
        ModelError: the region does something else, by its name and what differs.
        DsrunError: the cut one's own refusal, as it is.
    """
    terms, module = region.terms, region.module
    if gets_slices(module):
        call = Call(*with_hidden(call.args, dict(call.kwargs), lambda x: join_sequence(x, terms.axis)))
    params = dict(module.named_parameters())
    boxes = {name: cut.whole for name, cut in region.cuts.items() if cut.whole is not None}
    names = names_of(module)
    expected = found = Run()
    for adds_noise in (True, False):
        with ExitStack() as stack:
            with aside(device):
                values = {name: whole_of(param, boxes.get(name), terms.axis) for name, param in params.items()}
                wanted = {
                    name: leaf(with_noise(value, number) if adds_noise else value)
                    for number, (name, value) in enumerate(values.items())
                }
                del values
                stack.enter_context(with_weights(region.whole, wanted, names))
                expected = run_forward(region.whole, wanted, call)
            if expected.error is not None or not expected.outputs:
                return expected.failure or "it gives no tensor", []
            if adds_noise and not expected.has_numbers():
                continue
            with aside(device):  # anew, so that both draw the same random numbers
                own = {
                    name: leaf(part_of_whole(value.detach(), boxes.get(name), params[name]))
                    for name, value in wanted.items()
                }
                stack.enter_context(with_weights(region.cut, own, names))
                found = run_forward(region.cut, own, call, watched=region.open)
            if isinstance(found.error, DsrunError):
                raise found.error
            if found.error is not None:
                _fail(region, [f"its forward fails with {found.failure}"], hint=_of_failure(region))
            with aside(device):
                compared = _compared_outputs(found, expected)
                results = expected.results(compared)
                for name, its in boxes.items():
                    results[gradient_of(name)] = part_of_whole(results[gradient_of(name)], its, params[name])
                said = differences(
                    found.results(compared),
                    results,
                    terms.axis,
                    cut=boxes,
                    in_parts=region.cuts.keys() - boxes.keys(),
                    device=device,
                )
            break
    if said.errors:
        _fail(region, said.errors)
    if said.partial:
        _sum_gradients(said.partial, region)
    return "", _agreed(found.ran, region.open, terms.axis, device)


def _is_scripts(hook: Any) -> bool:
    """Whether a hook is neither an engine's nor one of this package."""
    owner = getattr(hook, "__self__", hook)
    module: str = getattr(owner, "__module__", None) or type(owner).__module__
    return not isinstance(hook, OwnHook) and not module.startswith("dsrun.")


def _agreed(ran: Collection[str], names: Sequence[str], axis: Collectives, device: torch.device) -> list[str]:
    """Returns the modules that ran on any rank, so that all ranks compare the others when they run."""
    flags = torch.tensor([float(name in ran) for name in names], device=device)
    axis.all_reduce(flags, op="max", label="modules that were compared").wait()
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]


def _of_failure(region: _Region) -> str:
    """Returns what may make the forward of a cut region fail where the whole one does not."""
    whole = [
        f"`{name}`"
        for name, part in region.module.named_modules()
        if isinstance(part, nn.Linear) and cut_state_of(part) is None
    ]
    left = f". The plan leaves {', '.join(whole[:4])} whole" if whole else ""
    return (
        "a length that a rank has a part of may be written as a number: count heads by the weight, as "
        f"`view(batch, time, -1, head_dim)`; packed heads must divide by {region.terms.axis.size} ranks{left}. "
        "Rules stand in `tensor_parallel.partition_config`; docs/guides/tensor.md has an example"
    )


def _fail(region: _Region, errors: Sequence[str], *, hint: str = _HINT) -> NoReturn:
    where = f"`{region.name}`" if region.name else "the model"
    kind = type(region.module).__name__
    more = f"; and {len(errors) - _MOST_ERRORS} more" if len(errors) > _MOST_ERRORS else ""
    raise ModelError(
        f"model: cut over {region.terms.axis.size} ranks, {where} ({kind}) does something else than "
        f"whole (plan of {region.terms.source}): {'; '.join(errors[:_MOST_ERRORS])}{more}",
        hint=hint,
    )


def _compared_outputs(found: Run, expected: Run) -> list[str]:
    """Returns the outputs that are compared: those of one shape, and the first, which are the hidden states.

    Beside these, blocks return what belongs to heads (weights of attention, a bias by position): parts, as they should.
    """
    names = list(expected.outputs)
    alike = [name for name in names if name in found.outputs and _shape(found, name) == _shape(expected, name)]
    return list(dict.fromkeys([*names[:1], *alike]))


def _shape(run: Run, name: str) -> tuple[int, ...]:
    return tuple(run.outputs[name].shape)


def _sum_gradients(names: Sequence[str], region: _Region) -> None:
    """Has gradients be summed over the ranks that the engine takes the mean of, as of all whole parameters."""
    size = region.terms.axis.size

    def as_part(grad: Tensor) -> Tensor:
        return grad * size

    found = [alike.module.get_parameter(name) for alike in region.kind.regions for name in names]
    for param in {id(param): param for param in found}.values():  # one that blocks share, once
        trains = param.requires_grad
        param.requires_grad_().register_hook(as_part)  # a frozen one may train later
        param.requires_grad_(trains)
    who = ", ".join(f"`{name}`" for name in names)
    region.terms.say(
        f"tensor parallelism: each rank has a part of the gradients of {who} in blocks like `{region.name}`, of which "
        f"the plan ({region.terms.source}) says nothing; they are summed"
    )
