"""Whether a plan is right: one block of each kind, cut, against the whole one, in the first forward.

A plan that forgets a sum or cuts the wrong dim trains to a worse loss, and nothing says so. So the first time that such
a block is called, it is run twice in fp32 with the very arguments that it was given: cut as it is, and whole with the
gathered weights. Outputs, gradients of inputs and gradients of all its parameters must agree.

A weight that a plan leaves whole may yet work on parts: a norm of this rank's heads, a factor of the activation. Each
rank then has a part of its gradient. Some plans do not say so (of transformers 5.20, those of 3 families). Where parts
add up to what the whole block gives, they are added up in training too, and that is told.

[Note: what is compared]
Both runs are in evaluation, so dropout draws nothing, and what random numbers are drawn is put back. The gradient of
the outputs is random, the same on all ranks. Gradients that the plan says are parts are summed, as the engine will.
Ranks agree on what they have found: each difference is the largest of all ranks, so all raise, or none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.errors import ModelError

from ...generators import generators_of
from ...kept_results import keeping
from ...layout.cuts import CutParameter, Cuts
from ...mesh.collectives import Collectives
from ...stacks import find_stacks
from ..twins import twin_of
from .sequence.blocks import own_slices, sliced_block_of
from .sequence.operators import join_sequence, with_hidden
from .styles import ModelPlan

#: Largest norm of a difference, by the norm of what it should be. Rounding in fp32 makes some 1e-6; a wrong plan, 1.
TOLERANCE = 1e-3
_CHECK = "_dsrun_tensor_check"
_GRADIENT = "gradient of `"
_SEED = 20_240_601


@dataclass(slots=True)
class BlockCheck:
    """One block to be looked at, once.

    Attributes:
        name: qualified name of the block.
        source: source of the plan.
        axis: ranks of the tensor axis.
        whole: twin of the block before it was cut.
        cut: twin of the block as it is cut.
        cuts: changes to its parameters, by their names in the block.
        alike: blocks of its kind, itself among them.
        say: callback that prints a message once for the whole job.
    """

    name: str
    source: str
    axis: Collectives
    whole: nn.Module
    cut: nn.Module
    cuts: Mapping[str, CutParameter]
    alike: Sequence[nn.Module]
    say: Callable[[str], None]

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model is checked by nobody."""


@dataclass(slots=True)
class KindOfBlock:
    """Blocks that are alike, before the model is cut.

    Attributes:
        whole: twin of the first one.
        names: qualified names of all.
    """

    whole: nn.Module
    names: list[str]


def kinds_of_blocks(model: nn.Module, plan: ModelPlan) -> list[KindOfBlock]:
    """Returns the kinds of blocks that a model has, in order of their first ones.

    Blocks of one kind are of one class, have parameters of the same names and shapes, and are cut alike.

    Args:
        model: model with whole parameters.
        plan: styles of its modules.
    """
    found: dict[object, KindOfBlock] = {}
    for stack in find_stacks(model, skip=lambda _: False):
        for name, block in stack.blocks:
            shapes = tuple((key, tuple(param.shape)) for key, param in block.named_parameters())
            kind = (type(block), shapes, _plan_inside(plan, name))
            if kind not in found:
                found[kind] = KindOfBlock(twin_of(block, with_tensors=True), [])
            found[kind].names.append(name)
    return list(found.values())


def _plan_inside(plan: ModelPlan, block: str) -> object:
    """Returns what a plan says of a block, for comparison with others."""
    of_names = (plan.modules, plan.parameters, plan.attributes)
    return tuple(
        frozenset((name.removeprefix(block), said) for name, said in one.items() if f"{name}.".startswith(f"{block}."))
        for one in of_names
    )


def check_in_first_forward(
    model: nn.Module,
    kinds: Sequence[KindOfBlock],
    cuts: Cuts,
    axis: Collectives,
    *,
    source: str,
    say: Callable[[str], None],
) -> None:
    """Has blocks be compared with what they were the first time that they are called; every rank must call.

    Args:
        model: model that has been cut.
        kinds: its blocks before they were cut, see `kinds_of_blocks`.
        cuts: changes to the model's parameters.
        axis: ranks of the tensor axis.
        source: source of the plan, as messages name it.
        say: callback that prints a message once for the whole job.
    """
    for kind in kinds:
        alike = [model.get_submodule(name) for name in kind.names]
        block: Any = alike[0]
        own = {key: cuts[id(param)] for key, param in block.named_parameters() if id(param) in cuts}
        if own:
            twin = _twin_of_cut(block, axis)
            check = BlockCheck(kind.names[0], source, axis, kind.whole, twin, own, alike, say)
            setattr(block, _CHECK, check)
            block.__class__ = _checked(type(block))


def _twin_of_cut(block: nn.Module, axis: Collectives) -> nn.Module:
    """Returns a twin of a cut block, which takes and returns whole sequences."""
    twin = twin_of(block, with_tensors=True)
    own_slices(twin, axis)
    return twin


def _checked(own: type[nn.Module]) -> type[Any]:
    """Returns a class whose first forward is looked at; behind the hooks around it, so that the weights are there."""

    class Checked(own):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            check: BlockCheck | None = self.__dict__.pop(_CHECK, None)
            self.__class__ = own  # pyright: ignore[reportAttributeAccessIssue]
            if check is not None:
                _compare(self, check, args, kwargs)
            return self.forward(*args, **kwargs)

    Checked.__name__, Checked.__qualname__, Checked.__module__ = own.__name__, own.__qualname__, own.__module__
    return Checked


def _compare(block: nn.Module, check: BlockCheck, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises where the block, cut, does something else than the whole one.

    Raises:
        ModelError: naming the block, and what differs in it by how much.
    """
    device = next(block.parameters()).device
    sliced = sliced_block_of(block)
    if sliced is not None and not sliced.splits:
        args, kwargs = with_hidden(args, dict(kwargs), lambda x: join_sequence(x, check.axis))
    with _aside(device):
        local = {name: _fp32(param) for name, param in block.named_parameters()}
        whole = {
            name: _whole(value, check.cuts[name].whole, check.axis) if name in check.cuts else value.clone()
            for name, value in local.items()
        }
        names = _names_of(block)
        expected = _run(check.whole, whole, names, args, kwargs)
    with _aside(device):  # anew, so that both draw the same random numbers
        found = expected if expected.failure else _run(check.cut, local, names, args, kwargs)
    if expected.failure:
        check.say(
            f"tensor parallelism: `{check.name}` cannot be run alone ({expected.failure}); its plan is not checked"
        )
        return
    if found.failure:
        errors, partial = [f"its forward fails with {found.failure}"], list[str]()
    else:
        compared = _compared_outputs(found, expected)
        with _aside(device):
            mine, wanted = found.results(compared), expected.results(compared)
            errors, partial = _differences(mine, wanted, check, device)
    if partial and not errors:
        _sum_gradients(partial, check)
    if not errors:
        return
    said = "; ".join(errors)
    raise ModelError(
        f"model: cut over {check.axis.size} ranks, `{check.name}` ({type(block).__name__}) does something else than "
        f"whole (plan of {check.source}): {said}",
        hint="say how its layers are cut in `tensor_parallel.partition_config`, with "
        '"partition_type": "skip" for what stays whole; docs/guides/tensor.md has an example',
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What one run has given, by what it is called in messages; or why there is nothing.

    Attributes:
        outputs: floating outputs, with their graph.
        leaves: inputs and weights that gradients are wanted of.
        failure: error of the forward; empty where it has none.
    """

    outputs: Mapping[str, Tensor]
    leaves: Mapping[str, Tensor]
    failure: str = ""

    def results(self, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Returns some outputs, and the gradients of a sum of them with random weights, the same on all ranks."""
        found = {name: self.outputs[name] for name in outputs}
        trained = [value for value in found.values() if value.requires_grad]
        generator = torch.Generator().manual_seed(_SEED)
        cotangents = [torch.randn(value.shape, generator=generator).to(value) for value in trained]
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            trained, list(self.leaves.values()), cotangents, allow_unused=True
        )
        gradients = {
            name: torch.zeros_like(leaf) if grad is None else grad  # pyright: ignore[reportUnnecessaryComparison]
            for (name, leaf), grad in zip(self.leaves.items(), grads, strict=True)
        }
        return {**{name: value.detach() for name, value in found.items()}, **gradients}


def _compared_outputs(found: _Run, expected: _Run) -> list[str]:
    """Returns the outputs that are compared: those of one shape, and the first, which are the hidden states.

    Beside these, blocks return what belongs to heads (weights of attention, a bias by position): parts, as they should.
    """
    names = list(expected.outputs)
    alike = [name for name in names if name in found.outputs and _shape(found, name) == _shape(expected, name)]
    return list(dict.fromkeys([*names[:1], *alike]))


def _shape(run: _Run, name: str) -> tuple[int, ...]:
    return tuple(run.outputs[name].shape)


def _names_of(block: nn.Module) -> dict[str, str]:
    """Returns all names of a block's parameters, and by each the first one of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(param), name) for name, param in block.named_parameters(remove_duplicate=False)}


def _run(
    twin: nn.Module,
    params: Mapping[str, Tensor],
    names: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> _Run:
    """Runs a block forward with some weights.

    Args:
        twin: look of the block.
        params: its weights by name.
        names: all names of each, see `_names_of`.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    inputs: dict[str, Tensor] = {}

    def copied(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _copy_of(value)  # a cache would be filled twice
        if not value.is_floating_point():
            return value
        made = _fp32(value)
        if value.requires_grad:
            inputs[f"gradient of argument {pytree.keystr(path)}"] = made.requires_grad_()
        return made

    try:
        own_args, own_kwargs = pytree.tree_map_with_path(copied, (args, dict(kwargs)))
        for name, first in names.items():
            _put(twin, name, leaves[first])
        for part in twin.modules():  # what a forward adds to a buffer is not added to the block's
            buffers = part.__dict__["_buffers"]
            part.__dict__["_buffers"] = {
                key: None if value is None else value.clone() for key, value in buffers.items()
            }
        outputs = twin(*own_args, **own_kwargs)
    except Exception as error:  # the caller tells, in its own words
        return _Run({}, {}, f"{type(error).__name__}: {error}")
    finally:
        for name in names:
            _put(twin, name, None)
    named = {
        f"output {pytree.keystr(path)}".rstrip(): value
        for path, value in pytree.tree_flatten_with_path(outputs)[0]
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return _Run(named, {**inputs, **{f"{_GRADIENT}{name}`": leaf for name, leaf in leaves.items()}})


def _copy_of(value: Any) -> Any:
    """Returns a copy of an argument, in which tensors have no graph: those that are computed cannot be copied."""
    memo: dict[int, Any] = {}
    known: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        if id(one) in known or isinstance(one, nn.Module | type):
            continue
        known.add(id(one))
        if isinstance(one, Tensor):
            memo[id(one)] = one.detach().clone()
        elif isinstance(one, list | tuple | set | frozenset):
            left += cast("list[Any]", one)
        elif isinstance(one, dict):
            left += cast("dict[Any, Any]", one).values()
        else:
            left += getattr(one, "__dict__", {}).values()
    return copy.deepcopy(value, memo)


def _put(twin: nn.Module, name: str, value: Tensor | None) -> None:
    owner, _, key = name.rpartition(".")
    held: dict[str, Any] = twin.get_submodule(owner)._parameters  # pyright: ignore[reportPrivateUsage]
    held[key] = value


def _differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], check: BlockCheck, device: torch.device
) -> tuple[list[str], list[str]]:
    """Returns what differs, on any rank, and by how much; and the whole parameters with gradients that are parts."""
    alone: list[Tensor] = []
    added: list[Tensor] = []
    names = list(expected)
    least = _least_scale(expected)
    params = [_parameter_in(name) for name in names]
    for name, param in zip(names, params, strict=True):
        mine, want = found[name], expected[name]
        cut = check.cuts.get(param)
        if cut is not None and cut.whole is not None:
            want = torch.cat([want[box.slices].reshape(-1) for box in cut.whole.boxes]).view(mine.shape)
        if mine.shape != want.shape:
            alone.append(torch.ones((), device=device))
            added.append(alone[-1])
            continue
        mine, want = _numbers(mine), _numbers(want)
        scale = want.norm().maximum(least * want.numel() ** 0.5)
        alone.append(((mine - want).norm() / scale).float())
        if param and (cut is None or cut.whole is None):
            mine = mine.clone(memory_format=torch.contiguous_format)
            check.axis.all_reduce(mine.view(-1), label="gradient in parts").wait()
        added.append(((mine - want).norm() / scale).float())
    worst = torch.stack([*alone, *added]).nan_to_num(nan=float("inf"))
    check.axis.all_reduce(worst, op="max", label="differences of a block").wait()
    one, all_ = worst.view(2, -1).tolist()
    errors: list[str] = []
    partial: list[str] = []
    for name, param, apart, together in zip(names, params, one, all_, strict=True):
        if param in check.cuts:  # of those that the plan calls parts, the sum counts
            apart = together
        if apart <= TOLERANCE:
            continue
        if param and together <= TOLERANCE:
            partial.append(param)
        else:
            errors.append(f"{name} differs by {apart:.2g} of itself")
    return errors, partial


def _numbers(value: Tensor) -> Tensor:
    """Returns a tensor with 0 for what is no number, as in rows that see nothing: in both runs, it is no difference."""
    return value.nan_to_num(0.0, 0.0, 0.0)


def _parameter_in(name: str) -> str:
    """Returns the parameter of which a result is the gradient, by its name in the block; empty where it is of none."""
    return name.removeprefix(_GRADIENT).removesuffix("`") if name.startswith(_GRADIENT) else ""


def _sum_gradients(names: Sequence[str], check: BlockCheck) -> None:
    """Has gradients be summed over the ranks that the engine takes the mean of, as of all whole parameters."""
    size = check.axis.size

    def as_part(grad: Tensor) -> Tensor:
        return grad * size

    found = [block.get_parameter(name) for block in check.alike for name in names]
    for param in {id(param): param for param in found}.values():  # one that blocks share, once
        trains = param.requires_grad
        param.requires_grad_().register_hook(as_part)  # a frozen one may train later
        param.requires_grad_(trains)
    who = ", ".join(f"`{name}`" for name in names)
    check.say(
        f"tensor parallelism: each rank has a part of the gradients of {who} in blocks like `{check.name}`, of which "
        f"the plan ({check.source}) says nothing; they are summed"
    )


def _least_scale(expected: Mapping[str, Tensor]) -> Tensor:
    """Returns what an element's size is taken for at least: some gradients are nothing but rounding.

    The bias of keys has none where positions are not rotated, for softmax does not see what is added to all of a row.
    """
    gradients = [_numbers(value) for name, value in expected.items() if name.startswith("gradient") and value.numel()]
    sizes = [value.norm() / value.numel() ** 0.5 for value in gradients]
    tiny = torch.finfo(torch.float32).tiny
    return 1e-2 * torch.stack(sizes).max().clamp_min(tiny) if sizes else torch.tensor(tiny)


def _fp32(value: Tensor) -> Tensor:
    """Returns a copy in fp32, or in fp64 of such a tensor."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)


def _whole(part: Tensor, boxes: TensorBoxes | None, axis: Collectives) -> Tensor:
    """Returns the whole of which ranks have parts: each fills in its boxes, and all are added up."""
    if boxes is None:
        return part.clone()
    whole = part.new_zeros(boxes.shape)
    position = 0
    flat = part.reshape(-1)
    for box in boxes.boxes:
        whole[box.slices] = flat[position : position + box.numel].view(box.shape)
        position += box.numel
    axis.all_reduce(whole.view(-1), label="weights of a block").wait()
    return whole


@contextmanager
def _aside(device: torch.device) -> Generator[None]:
    """Inside, nothing that is done is seen outside: no graph, no recomputation, no autocast, no random numbers."""
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    with (
        keeping(None),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
