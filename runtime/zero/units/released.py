"""Parameters whose values are elsewhere, and what an operation on one gets. Their homes know who has the values.

[Note: operations on released parameters]
Between its unit's uses a parameter's memory holds the values of other units (stage 3), or an update may still be on its
way there. Then the parameter has a class by which torch asks here first, for every operation of Python's on it.
- An operation that reads no values (shape, dtype, `grad`, hooks) runs as on any tensor.
- Any other gets a *copy* of the whole values, in the parameter's place. Every rank must run it. Its gradient flows to
  the parameter.
- If it has changed the copy, the new values are written to where the parameter's values are.
- What it returns that is a view of the copy, or the copy itself (`data`, `detach`, a slice), is an `OutsideTensor`: it
  is asked about in the same way, follows later values, and what is written to it reaches the parameter.
While a unit is in use its parameters have another class, at which torch asks nobody: what blocks compute costs nothing.
Not seen are a kept parameter that is given to the `apply` of a custom autograd function, and reads by address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...compat import without_overrides
from ..partition_parameters import EngineParameter, ParameterOwner, ShardedParameter, home_of, memory_of, set_memory

_T: Any = Tensor
#: Getters that read values; all others (shape, dtype, grad, ...) do not.
_VALUE_GETTERS = {
    getattr(_T, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "data") if hasattr(_T, name)
}
#: Functions and methods that read no values of the parameter they are called with.
_WITHOUT_VALUES = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset element_size data_ptr is_contiguous is_floating_point
    is_complex is_signed _has_compatible_shallow_copy_type is_inference is_pinned is_shared is_conj is_neg
    is_same_size is_tensor is_storage get_device dim_order has_names __len__ __hash__ __format__ __repr__ __dir__
    register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ _is_view untyped_storage storage
    _typed_storage new_empty new_empty_strided new_zeros new_ones new_full new_tensor empty_like zeros_like
    ones_like full_like rand_like randn_like randint_like result_type can_cast promote_types grad backward
    _is_zerotensor __reduce_ex__ __deepcopy__ share_memory_ record_stream
    """.split()  # noqa: SIM905 - as a list it takes sixty lines
)


#: Methods that return the tensor itself where it has that dtype and device already.
_CONVERSIONS = frozenset(["to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type", "contiguous"])


class ReleasedParameter(ShardedParameter):
    """A sharded parameter while its unit is not in use, see [Note: operations on released parameters]."""

    @property
    def data(self) -> Tensor:
        """The parameter's values without its history: a copy that follows, and what is written to it is taken over."""
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        home = home_of(self)
        if home is None or home.is_open:
            set_memory(self, value)
        elif value is not self:  # a conversion that has nothing to do
            home.replace(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Returns what is known without the values."""
        del tensor_contents
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Parameter of shape {tuple(self.shape)}, {dtype} on {self.device}, in pieces on all ranks"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See [Note: operations on released parameters]."""
        del types
        return _run(func, args, kwargs or {})


class PendingParameter(EngineParameter):
    """A whole parameter to which the last update may still bring new values: whoever wants them waits."""

    @property
    def data(self) -> Tensor:
        """The parameter's memory, with its new values."""
        _arrive(self)
        return EngineParameter.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _arrive(self)
        set_memory(self, value)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Waits for the values where the operation wants any."""
        del types
        with without_overrides():
            if not _reads_nothing(func):
                _each((args, kwargs), _arrive)
            return func(*args, **(kwargs or {}))


class OutsideTensor(Tensor):
    """A copy of a released parameter's values, or a view of it; see [Note: operations on released parameters]."""

    _source: _Source

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the values into an ordinary tensor."""
        return memo.setdefault(id(self), _plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values as those of an ordinary tensor."""
        return _plain(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See [Note: operations on released parameters]."""
        del types
        return _run(func, args, kwargs or {})


def outside(values: Tensor, param: nn.Parameter) -> Tensor:
    """Returns a copy of a released parameter's whole values as what follows it; see `OutsideTensor`.

    Args:
        values: the copy, with a gradient or without.
        param: parameter that the values were copied from.
    """
    home = home_of(param)
    if home is None:
        return values
    with without_overrides():
        return _wrapped(values, _Source(home, values))


class _Source:
    """A copy of a parameter's whole values, which operations read and write.

    Args:
        home: home of the parameter.
        values: the copy.
    """

    __slots__ = ("_follows", "_moment", "home", "memory")

    def __init__(self, home: ParameterOwner, values: Tensor) -> None:
        self.home = home
        self.memory = values.detach()
        self._follows = not values.requires_grad  # a graph reads what it has read
        self._moment = home.moment()

    @property
    def _is_orphan(self) -> bool:
        """Whether the script has given the parameter other memory since: this is a tensor like any other then."""
        return self._moment[0] != self.home.moment()[0]

    def follow(self) -> None:
        """Brings values that have come since; every rank must call."""
        if self._moment == self.home.moment() or self._is_orphan or not self._follows:
            return
        with torch.no_grad():
            self.memory.copy_(self.home.read())
        self._moment = self.home.moment()

    def check(self) -> None:
        """Raises where the copy was made of older values than there are.

        Raises:
            ModelError: naming the parameter.
        """
        if self._moment != self.home.moment() and not self._is_orphan:
            raise ModelError(
                f"model: `{self.home.name}` is written to through a tensor that a forward has read, and its values "
                "have changed since",
                hint="write to the parameter itself, under torch.no_grad()",
            )

    def write(self) -> None:
        """Writes the copy to where the parameter's values are."""
        if not self._is_orphan:
            self.home.write(self.memory)
            self._moment = self.home.moment()


class _Seen:
    """A tensor that an operation gets, as it was before.

    Args:
        tensor: a copy, or a view of one.
        source: the copy.
        is_leaf: whether the tensor stands for a parameter.
    """

    __slots__ = ("_node", "_version", "is_leaf", "source", "tensor")

    def __init__(self, tensor: Tensor, source: _Source, *, is_leaf: bool) -> None:
        self.tensor = tensor
        self.source = source
        self.is_leaf = is_leaf
        self._version = tensor._version
        self._node = tensor.grad_fn

    def was_changed(self) -> bool:
        """Returns whether the operation has changed it in place.

        Raises:
            RuntimeError: torch would record that, which it refuses of a parameter.
        """
        if self.tensor._version == self._version:
            return False
        if self.is_leaf and self.tensor.grad_fn is not self._node:
            raise RuntimeError(
                f"a leaf Variable that requires grad is being used in an in-place operation: `{self.source.home.name}`"
            )
        return True


class _Call:
    """One operation: copies in the place of parameters, and what becomes of them."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._seen: list[_Seen] = []

    def lift(self, value: Any) -> Any:
        """Returns `value` with a copy in the place of every released parameter in it."""
        if isinstance(value, ReleasedParameter):
            return self._copy_of(value)
        if isinstance(value, OutsideTensor):
            source = value._source  # pyright: ignore[reportPrivateUsage]
            source.follow()
            self._seen.append(_Seen(value, source, is_leaf=False))
            return value
        if type(value) in (list, tuple):
            return type(value)(self.lift(item) for item in value)
        if type(value) is dict:
            return {key: self.lift(item) for key, item in value.items()}
        return value

    def write(self) -> None:
        """Writes back what the operation has changed."""
        sources: dict[int, _Source] = {}
        for seen in self._seen:
            if seen.was_changed():
                seen.source.check()
                sources[id(seen.source)] = seen.source
        for source in sources.values():
            source.write()

    def give(self, result: Any) -> Any:
        """Returns what the script gets: views of copies follow the parameter, a copy itself is the parameter."""
        if isinstance(result, Tensor):
            for param, copy in self._copies.values():
                if result is copy:
                    return param
            if isinstance(result, OutsideTensor) or not self._seen:
                return result
            found = next((seen.source for seen in self._seen if _shares_memory(result, seen.source.memory)), None)
            return result if found is None else _wrapped(result, found)
        if type(result) in (list, tuple):
            return type(result)(self.give(item) for item in result)
        return result

    def _copy_of(self, param: nn.Parameter) -> Tensor:
        known = self._copies.get(id(param))
        if known is not None:
            return known[1]
        home = home_of(param)
        if home is None or home.is_open:
            return param
        copy = home.read()
        self._copies[id(param)] = (param, copy)
        self._seen.append(_Seen(copy, _Source(home, copy), is_leaf=True))
        return copy


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with without_overrides():
        if _reads_nothing(func):
            return func(*args, **kwargs)
        if _converts_nothing(func, args, kwargs):
            return args[0]
        call = _Call()
        result = func(*call.lift(tuple(args)), **call.lift(dict(kwargs)))
        call.write()
        return call.give(result)


def _reads_nothing(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func not in _VALUE_GETTERS
    return name in _WITHOUT_VALUES


def _converts_nothing(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is a conversion that gives a parameter itself; `model.to(device)` then gathers nothing."""
    if getattr(func, "__name__", "") not in _CONVERSIONS or not isinstance(args[0], ReleasedParameter):
        return False
    if "memory_format" in kwargs:
        return False
    like = memory_of(args[0]).new_empty(0)
    return func(like, *args[1:], **kwargs) is like


def _wrapped(values: Tensor, source: _Source) -> Tensor:
    made = values.as_subclass(OutsideTensor)
    made._source = source  # pyright: ignore[reportPrivateUsage]
    return made


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one.device != other.device or not one.numel():
        return False
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # inside torch.func transforms: no memory, so none that is shared
        return False


def _plain(tensor: Tensor) -> Tensor:
    with without_overrides():
        return tensor.detach().clone()


def _each(value: Any, act: Callable[[Any], None]) -> None:
    if isinstance(value, Tensor):
        act(value)
    elif isinstance(value, Mapping):
        _each(tuple(value.values()), act)
    elif isinstance(value, list | tuple):
        for item in value:
            _each(item, act)


def _arrive(tensor: Tensor) -> None:
    home = home_of(tensor) if isinstance(tensor, PendingParameter) else None
    if home is not None:
        home.wait_update()
