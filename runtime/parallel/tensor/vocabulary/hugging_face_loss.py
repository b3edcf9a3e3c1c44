"""The loss that a Hugging Face model makes itself, over a vocabulary that is cut over the tensor axis.

Models of transformers give their logits to `self.loss_function`, which can be replaced. Where that is enough is found
out here; who cuts the output layer decides what happens elsewhere: the whole logits are gathered.

[Note: logits that are parts]
The output layer gives this rank's logits, and only the loss knows what to do with them. So they stay parts in forwards
alone that make a loss to train by: with labels, and with gradients on. In all others (generation, evaluation, a script
with a loss of its own) they are gathered behind the output layer, and what the model does with them is as ever.

A script gets whole logits in either case. Where the outermost model returns, those in its output that are parts are
replaced by whole ones that are gathered when the script first uses them, see [Note: logits gathered when used]: a
script that uses the loss alone sends nothing, and all ranks of the axis have to use the logits alike. They are found by
their length and by the graph: a model may scale what the output layer gives, or choose positions.

[Note: what a forward does with logits]
That a model has a loss function does not say that its forward calls it, nor that logits go there as they are: some mask
tokens by number, or cut padding off. So the text of the forward is read, and each use of logits in it must be one that
a part bears as well as the whole: conversions, arithmetic, a choice of positions, the loss, the output.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..operators import gather_last
from .cross_entropy import cut_cross_entropy
from .part import VocabularyPart
from .whole_logits import whole_when_used

_LOSSES = "transformers.loss.loss_utils"
#: Names of transformers' losses that end in a cross entropy over tokens, and whether they shift the labels.
_SHIFTS: Mapping[str, bool] = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
_LABELS = ("labels", "shift_labels")
#: What a part of the logits bears: attributes and methods of it, and functions that take it.
_ATTRIBUTES = frozenset(["float", "to", "contiguous", "dtype", "device"])
_FUNCTIONS = frozenset(["loss_function", "tanh", "soft_cap"])
#: One thread at a time parses: CPython's parser mixes up the depths of several (python/cpython#106905).
_PARSING = threading.Lock()


def cut_loss_of(model: nn.Module, part: VocabularyPart) -> bool:
    """Makes a Hugging Face model compute its loss from logits of which each rank has a part, where that can be.

    The model's output layer must give this rank's part, from now on. The logits in the model's output are whole; those
    beside a loss to train by are gathered when they are first used, by all ranks of the part's axis alike, see
    [Note: logits that are parts]. Losses have the values of transformers' with `ignore_index`, `shift_labels`
    and `num_items_in_batch`, and are the same on every rank.

    Args:
        model: the model, changed in place if the answer is yes.
        part: tokens that this rank's output layer has.

    Returns:
        Whether it does. If not, nothing has changed, and the whole logits have to be gathered: `loss_obstacle` says
        why, or the part asks for exact losses.
    """
    if part.exact or loss_obstacle(model) is not None:
        return False
    head = _output_layer(model)
    assert head is not None, "no obstacle"
    forwards = _PartsOfLogits(part)
    for owner in _owners(model, head):
        whole: Any = owner.loss_function
        owner.loss_function = CutLoss(part, whole, _SHIFTS[whole.__name__])
        forwards.watch(owner)
    head.register_forward_hook(forwards.gather_unless_for_loss)
    return True


def loss_obstacle(model: nn.Module) -> str | None:
    """Returns why a model's loss cannot be made from parts of its logits; None where it can.

    Args:
        model: any model; only its classes and the text of their forwards are read.
    """
    head = _output_layer(model)
    if head is None:
        return f"{type(model).__name__} names no output layer (`get_output_embeddings`)"
    owners = list(_owners(model, head))
    if model not in owners:
        return f"{type(model).__name__} has no `loss_function`"
    for owner in owners:
        name, loss = type(owner).__name__, owner.loss_function
        if getattr(loss, "__module__", None) != _LOSSES or getattr(loss, "__name__", None) not in _SHIFTS:
            return f"the loss of {name} is {getattr(loss, '__name__', type(loss).__name__)}"
        use = _use_of_whole_logits(owner)
        if use is not None:
            return f"the forward of {name} {use}"
    return None


@dataclass(frozen=True, slots=True)
class CutLoss:
    """What a model has for `loss_function` where its output layer is cut; called as transformers' losses are.

    Attributes:
        part: tokens that this rank's output layer has.
        whole: transformers' loss, for logits that are whole: gathered ones, and those of the model's other layers.
        shifts: whether the token at a position is the target of the one before.
    """

    part: VocabularyPart
    whole: Callable[..., Tensor]
    shifts: bool

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Returns the loss, a scalar in fp32; for parts of logits with two all-reduces, see `cut_cross_entropy`.

        Args:
            logits: shape [..., tokens], this rank's part or whole ones.
            labels: int64, shape [...], tokens of the whole vocabulary.
            vocab_size: tokens of the whole vocabulary.
            num_items_in_batch: number by which the sum is divided; None for the tokens that count.
            ignore_index: label of tokens that do not count.
            shift_labels: targets where they are at hand; None for those that labels make.
            more: Further arguments of the model's caller, which transformers' losses take and leave alone.
        """
        if logits.shape[-1] != self.part.tokens or vocab_size != self.part.whole:
            shifted = {"shift_labels": shift_labels} if self.shifts else {}
            return self.whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index=ignore_index, **shifted, **more
            )
        targets = shift_labels if self.shifts else labels
        if targets is None:
            assert labels is not None, "a loss without targets"
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = cut_cross_entropy(
            logits.float().flatten(0, -2),
            targets.flatten().to(logits.device),
            self.part,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class _PartsOfLogits:
    """Which forwards leave logits cut, and what their callers get: see [Note: logits that are parts].

    Its methods are hooks, and a copy of the model has copies of them.

    Args:
        part: tokens that this rank's output layer has.
    """

    def __init__(self, part: VocabularyPart) -> None:
        self._part = part
        self._for_loss: list[bool] = []
        self._made_by: list[Node] = []  # nodes of the parts that the output layer has given

    def watch(self, owner: Any) -> None:
        """Looks at the labels that a model gets which makes a loss."""
        owner.register_forward_pre_hook(self._enter, with_kwargs=True)
        owner.register_forward_hook(self._leave, always_call=True)

    def gather_unless_for_loss(self, head: nn.Module, args: Any, logits: Tensor) -> Tensor:
        """Returns what the output layer gives: its part, or the whole."""
        if any(self._for_loss) and logits.grad_fn is not None:
            self._made_by.append(logits.grad_fn)
            return logits
        return gather_last(logits, self._part.axis, whole=self._part.whole)

    def _enter(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = inspect.signature(owner.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        has_labels = any(name in names and given.get(name) is not None for name in _LABELS)
        self._for_loss.append(has_labels and torch.is_grad_enabled())

    def _leave(self, owner: nn.Module, args: Any, output: Any) -> Any:
        if self._for_loss:  # or an earlier hook has failed
            self._for_loss.pop()
        if self._for_loss:
            return None  # a model around it goes on with parts
        made_by = set(self._made_by)
        self._made_by.clear()
        if not made_by:
            return None
        if isinstance(output, Tensor | MutableMapping | tuple | list):
            return self._with_whole_logits(output, made_by)  # pyright: ignore[reportUnknownArgumentType]
        self._with_whole_logits(getattr(output, "__dict__", {}), made_by)
        return None

    def _with_whole_logits(self, value: Any, made_by: Collection[Node]) -> Any:
        """Returns an output with whole logits in the place of parts; what can be changed in place is."""
        if isinstance(value, Tensor):
            is_part = value.dim() and value.shape[-1] == self._part.tokens and _comes_from(value, made_by)
            return whole_when_used(value, self._part) if is_part else value
        if isinstance(value, MutableMapping):  # a ModelOutput sets its attributes too
            entries: MutableMapping[Any, Any] = value
            for key, item in list(entries.items()):
                entries[key] = self._with_whole_logits(item, made_by)
        elif isinstance(value, tuple | list):
            items: list[Any] = [self._with_whole_logits(item, made_by) for item in value]  # pyright: ignore[reportUnknownVariableType]
            kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        return value


def _comes_from(tensor: Tensor, nodes: Collection[Node]) -> bool:
    """Whether the graph of a tensor leads to one of some nodes."""
    ahead = deque([tensor.grad_fn])
    seen = {None, *ahead}
    while ahead:
        node = ahead.popleft()
        if node in nodes:
            return True
        behind = {one for one, _ in node.next_functions} - seen if node is not None else set[Node]()
        seen |= behind
        ahead.extend(behind)
    return False


def _output_layer(model: nn.Module) -> nn.Module | None:
    ask: Any = getattr(model, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else None


def _owners(model: nn.Module, head: nn.Module) -> Iterator[Any]:
    """Yields the models in a model, itself included, that have a loss and this output layer."""
    for module in model.modules():
        if hasattr(module, "loss_function") and _output_layer(module) is head:
            yield module


def _use_of_whole_logits(owner: nn.Module) -> str | None:
    """Returns what a forward does that a part of the logits does not bear; None for nothing.

    See [Note: what a forward does with logits].
    """
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(owner.forward)))
    except (OSError, TypeError):
        return "has no text to read"
    with _PARSING:
        tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(ast.unparse(call.func) == "self.loss_function" for call in calls):
        return "makes its loss without `self.loss_function`"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and _names_logits(node.id) and not _bears_parts(node, parents):
            return f"has `{ast.unparse(parents[node])}`"
    return None


def _names_logits(name: str) -> bool:
    return name.endswith("logits") and "router" not in name


def _bears_parts(use: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a use of logits is right for a part of them too."""
    if isinstance(use.ctx, ast.Store):
        return True
    parent = parents[use]
    while isinstance(parent, ast.keyword | ast.Tuple):
        parent = parents[parent]
    match parent:
        case ast.Attribute(attr=name):
            return name in _ATTRIBUTES
        case ast.Subscript(value=ast.Name(), slice=ast.Tuple(elts=[_, _, ast.Slice(None, None, None)])):
            return True  # positions, and all tokens of the vocabulary
        case ast.Call(func=function):
            name = ast.unparse(function).rpartition(".")[2]
            return name in _FUNCTIONS or name[:1].isupper()  # a class of outputs
        case ast.Assign(targets=[ast.Name(id=name)]):
            return _names_logits(name)
        case ast.BinOp() | ast.Return():
            return True
        case _:
            return False
