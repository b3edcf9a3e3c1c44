"""Splits the backward of linear layers: gradients of the inputs now, those of weights and biases when asked for.

Knows modules and products; when which half runs is its caller's to say, and where gradients go from `.grad` as well.

[Note: two halves of a backward]
The rank before waits for the gradients of a chunk's inputs, and nobody for those of its weights. So inside of
`DeferredWeightGrads.deferring` a linear layer's backward makes the former alone, and queues its input and the gradient
of its output; `run` makes the latter of them. Outside of it both are made at once. All other parameters (norms,
embeddings) get their gradients in the first half.

Bits are those of torch's own backward: the same products of the same operands in the same order, each parameter's
gradients of one backward summed before they are added to `.grad`, as autograd does it. So a parameter must get its
gradients in one of the two halves and not in both. Layers whose parameters other kinds of modules use too are left as
they are; where a script uses such a weight by itself, that is refused by name. Parameters with hooks of torch's
(`register_hook`) get their gradients at once, for the hooks are to see them.

Under autocast the operands are cast here, and products of one weight are summed in autocast's dtype before they are
cast back, which is what torch's cache of cast weights comes to where a backward's forward was in one region.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from dsrun.errors import ModelError

from ...compat import in_transform, without_overrides
from ...late_compiler import UncompiledFunction
from ..linear_products import asks_for_product, plain_product, put_product, take_away_product


class DeferredWeightGrads:
    """The linear layers of a model whose weight gradients can wait, see [Note: two halves of a backward].

    Their forwards are replaced on the instance, so names, hooks and classes stay; `remove` undoes it. Of layers whose
    forward does more than the product (`linear_products.py`), as those that are cut over ranks, the product alone is.

    Args:
        model: module to look through, under whose names its parts are named; one rank's chunks, all of them.

    Attributes:
        left: reasons by name, of linear layers that have all their gradients made at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._open: _Queue | None = None
        self._watched: dict[int, tuple[Any, RemovableHandle]] = {}  # nodes that add to `.grad`, by the parameter's id
        self._installed: list[nn.Module] = []
        waiting = {name: module for name, module in model.named_modules() if _can_wait(module)}
        self.left: Mapping[str, str] = _shared_with_others(model, waiting)
        for name, module in waiting.items():
            if name not in self.left:
                made = _InstanceForward(_Call(name, module, self).forward, module)
                if asks_for_product(module):
                    put_product(module, made)
                else:
                    module.forward = made
                self._installed.append(module)

    @contextmanager
    def deferring(self, chunk: int, micro: int) -> Generator[None]:
        """Inside, backwards queue what weight gradients are made of. One that raises leaves nothing in the queue.

        Args:
            chunk: number of the chunk whose backward runs inside.
            micro: number of its micro batch.

        Raises:
            ModelError: a parameter got gradients in another way as well.
        """
        key = (chunk, micro)
        assert self._open is None, "one backward at a time"
        assert key not in self._queues, f"the weight gradients of micro batch {micro} of chunk {chunk} wait already"
        self._open = queue = _Queue()
        try:
            yield
        finally:
            self._open = None
        self._queues[key] = queue

    def run(self, chunk: int, micro: int) -> None:
        """Makes the weight gradients of a backward and adds them to `.grad`; what was queued for them goes.

        Where a parameter has a `.grad`, it is added to in place, as autograd does; else it is set. So whoever sums up
        in buffers has them attached as `.grad` from before this until after it, and finds in them what this backward
        gives; it need not be the buffers that were attached while the first half ran.

        Args:
            chunk: number of the chunk.
            micro: number of the micro batch, whose backward ran in `deferring`.
        """
        queue = self._queues.pop((chunk, micro), None)
        assert queue is not None, f"no weight gradients of micro batch {micro} of chunk {chunk} wait"
        queue.run()

    def forget(self) -> None:
        """Drops all that waits, as after an error."""
        self._queues.clear()

    @property
    def queued_bytes(self) -> int:
        """Bytes that are alive for what waits; memory that several layers share is counted once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for queue in self._queues.values()
            for waiting in queue.products
            for storage in (waiting.rows.untyped_storage(), waiting.inputs.untyped_storage())
        }
        return sum(storages.values())

    def put(self, waiting: _Waiting, queue: _Queue) -> None:
        """Has a product wait in the open queue."""
        queue.products.append(waiting)
        for param in waiting.params:
            queue.params.add(id(param))
            if id(param) not in self._watched:
                # Autograd comes to this node after all uses of the parameter: in this backward, it has yet to.
                node: Any = get_gradient_edge(param).node
                handle = node.register_prehook(partial(self._refuse_gradient, id(param), waiting.name))
                self._watched[id(param)] = (node, handle)

    def _refuse_gradient(self, param: int, name: str, grads: Sequence[Tensor | None]) -> None:
        if self._open is not None and param in self._open.params and grads[0] is not None:
            raise ModelError(
                f"model: a parameter of `{name}` is used outside of that module's forward as well, so its gradient "
                "cannot be split off: the two parts would be added in another order than without a pipeline",
                hint='call the module itself and not its weight, or set `pipeline.schedule` to "1f1b"',
            )

    @property
    def open_queue(self) -> _Queue | None:
        """What the backward that runs is to queue in; None where nothing is to wait."""
        return self._open

    def remove(self) -> None:
        """Gives the layers their own forwards back."""
        for module in self._installed:
            module.__dict__.pop("forward", None)
            take_away_product(module)
        self._installed.clear()
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()


@dataclass(slots=True)
class _Waiting:
    """One product whose weight gradient is to be made.

    Attributes:
        name: qualified name of the layer.
        rows: gradient of the product, shape [rows, out].
        inputs: first operand, shape [rows, in].
        weight: the layer's weight.
        bias: the layer's bias, where it trains.
        bias_rows: gradient of what the bias was added to, which the bias' gradient is the sum of.
        is_column_major: whether the second operand was laid out by columns.
        is_transposed: whether the second operand is the weight's transpose.
    """

    name: str
    rows: Tensor
    inputs: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    bias_rows: Tensor
    is_column_major: bool
    is_transposed: bool

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """Parameters that get gradients of it."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def weight_grad(self) -> Tensor:
        """Returns the gradient of the weight."""
        grad = _second_grad(self.rows, self.inputs, is_column_major=self.is_column_major)
        return grad.t() if self.is_transposed else grad

    def bias_grad(self) -> Tensor:
        """Returns the gradient of the bias."""
        assert self.bias is not None, "it has none"
        return self.bias_rows.sum_to_size(self.bias.shape)


@dataclass(slots=True)
class _Queue:
    """What one backward leaves for later, in the order in which it came.

    Attributes:
        products: products that are to be made.
        params: ids of the parameters that get gradients of it.
    """

    products: deque[_Waiting] = field(default_factory=deque[_Waiting])
    params: set[int] = field(default_factory=set[int])

    def run(self) -> None:
        """Adds all gradients, first come first."""
        left = Counter(id(param) for waiting in self.products for param in waiting.params)
        sums: dict[int, dict[torch.dtype, Tensor]] = {}
        while self.products:
            waiting = self.products.popleft()
            for param in waiting.params:
                grad = waiting.weight_grad() if param is waiting.weight else waiting.bias_grad()
                by_dtype = sums.setdefault(id(param), {})
                before = by_dtype.get(grad.dtype)
                by_dtype[grad.dtype] = grad if before is None else before + grad
                left[id(param)] -= 1
                if not left[id(param)]:
                    _accumulate(param, list(sums.pop(id(param)).values()))


class _Call:
    """The forward of one layer.

    Args:
        name: qualified name of the layer.
        module: the layer.
        owner: layers that have the open queue.
    """

    def __init__(self, name: str, module: nn.Module, owner: DeferredWeightGrads) -> None:
        self.name = name
        self.owner = owner
        self.is_transposed = isinstance(module, nn.Linear)
        self._module = module
        self._plain = _own_forward(module)

    def forward(self, x: Tensor, *, has_bias: bool = True) -> Tensor:
        """Returns what the layer's own forward returns; of a product without a bias, the product."""
        module: Any = self._module
        weight, bias = module.weight, module.bias if has_bias else None
        if (
            not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf)
            or type(x) not in (Tensor, nn.Parameter)
            or type(weight) is not nn.Parameter
            or x.layout is not torch.strided
            or in_transform()
        ):
            return self._plain(x) if has_bias else self._plain(x, has_bias=False)
        if x.dim() == 2 or (self.is_transposed and not (bias is not None and x.is_contiguous())):
            return _Product.apply(x, weight, bias, self)  # pyright: ignore
        # torch adds the bias to rows too; a result made of rows in a function could not be changed in place after it.
        rows: Any = _Product.apply(x.reshape(x.numel() // x.shape[-1], x.shape[-1]), weight, bias, self)  # pyright: ignore
        return rows.view(*x.shape[:-1], rows.shape[-1])

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product by torch's own call."""
        if self.is_transposed:
            return functional.linear(x, weight, bias)
        assert bias is not None, "a Conv1D has a bias"
        return torch.addmm(bias, x, weight)


class _Product(torch.autograd.Function):
    """The product of a layer; in backward, see [Note: two halves of a backward]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, call: _Call) -> Tensor:
        """Returns the product, shape [..., out]."""
        kind = x.device.type
        ctx.call, ctx.weight, ctx.bias, ctx.cast, ctx.x_dtype = call, weight, bias, None, x.dtype
        if not torch.is_autocast_enabled(kind):
            ctx.save_for_backward(x, weight)
            return call.product(x, weight, bias)
        ctx.cast = dtype = torch.get_autocast_dtype(kind)
        x = _cast(x, dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(kind, enabled=False):
            return call.product(x, _cast(weight, dtype), None if bias is None else _cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Returns the gradient of the input, and those of weight and bias unless they are to wait."""
        (grad,) = grads
        x, saved_weight = ctx.saved_tensors  # a recomputation gives the weight's values, and not the parameter
        call: _Call = ctx.call
        weight: nn.Parameter = ctx.weight
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        rows = grad.reshape(grad.numel() // grad.shape[-1], grad.shape[-1]) if grad.dim() != 2 else grad
        inputs = x.reshape(x.numel() // x.shape[-1], x.shape[-1]) if x.dim() != 2 else x
        used = saved_weight if ctx.cast is None else _cast(saved_weight, ctx.cast)
        second = used.t() if call.is_transposed else used
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _first_grad(rows, inputs, second).reshape(x.shape).to(ctx.x_dtype)
        waiting = _Waiting(
            call.name,
            rows,
            inputs,
            weight,
            bias,
            bias_rows=grad if x.dim() != 2 else rows,
            is_column_major=_is_column_major(second),
            is_transposed=call.is_transposed,
        )
        queue = call.owner.open_queue
        if queue is not None and ctx.needs_input_grad[1] and not _has_hooks(weight) and not _has_hooks(bias):
            if torch.is_grad_enabled():
                raise ModelError(
                    f"model: the backward of `{call.name}` is to be differentiated (create_graph=True), which a "
                    "backward whose weight gradients wait cannot be",
                    hint='set `pipeline.schedule` to "1f1b"',
                )
            call.owner.put(waiting, queue)
            return x_grad, None, None, None
        weight_grad = waiting.weight_grad().to(weight.dtype) if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None if bias is None else waiting.bias_grad().to(bias.dtype), None


class _InstanceForward(UncompiledFunction):
    """A forward on an instance, of which copies of the instance have that of their class.

    Args:
        function: function to call.
        module: module that it is the forward of.
    """

    def __new__(cls, function: Any, module: nn.Module) -> Any:
        """Makes it."""
        made: Any = super().__new__(cls, function)
        made.module = module
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves the function behind."""
        made: Any = self
        return _own_forward, (made.module,)


def _own_forward(module: nn.Module) -> Any:
    if asks_for_product(module):
        return partial(plain_product, module)
    return MethodType(type(module).forward, module)


def _can_wait(module: nn.Module) -> bool:
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    # A cut Linear is one behind a class that asks: `__bases__` are these two.
    is_linear = kind is nn.Linear or (asks_for_product(module) and kind.__bases__[1] is nn.Linear)
    if not (is_linear or is_conv1d) or "forward" in module.__dict__:
        return False
    own = _own_params(module)
    weight = own.get("weight")
    return weight is not None and weight.is_floating_point() and "bias" in own


def _own_params(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """Returns the module's own parameters, also those that it has under several names or without one."""
    return vars(module)["_parameters"]


def _shared_with_others(model: nn.Module, waiting: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns the layers that use a parameter together with a module whose gradients do not wait, and why, by name."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in _own_params(module).values():
            if param is not None:
                users.setdefault(id(param), []).append(module)
    left: dict[str, str] = {}
    at_once = {module for shared in users.values() for module in shared} - set(waiting.values())
    grows = True
    while grows:
        grows = False
        for name, module in waiting.items():
            if name in left:
                continue
            for attribute, param in _own_params(module).items():
                other = next((user for user in users.get(id(param), ()) if user in at_once), None)
                if other is not None:
                    left[name] = f"its {attribute} belongs to a {type(other).__name__} too"
                    at_once.add(module)
                    grows = True
                    break
    return left


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor as autocast gives it to a product."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _first_grad(grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns the gradient of `first` in `first @ second`, as torch's backward makes it: in the layout of `first`."""
    if _is_column_major(first):
        return second.mm(grad.t()).t()
    return grad.mm(second.t())


def _second_grad(grad: Tensor, first: Tensor, *, is_column_major: bool) -> Tensor:
    """Returns the gradient of the second operand, as torch's backward makes it: in that operand's layout."""
    if is_column_major:
        return grad.t().mm(first).t()
    return first.t().mm(grad)


def _has_hooks(param: nn.Parameter | None) -> bool:
    """Whether somebody is to see the parameter's gradient when autograd has made it."""
    if param is None:
        return False
    bare: Any = param
    return bool(bare._backward_hooks) or bool(bare._post_accumulate_grad_hooks)


def _accumulate(param: nn.Parameter, sums: list[Tensor]) -> None:
    total = sums[0].to(param.dtype)
    for each in sums[1:]:
        total = total + each.to(param.dtype)
    with torch.no_grad(), without_overrides():
        if param.grad is None:
            param.grad = total
        else:
            param.grad.add_(total)
