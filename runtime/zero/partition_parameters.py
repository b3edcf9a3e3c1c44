"""What scripts read of a parameter that an engine has, by DeepSpeed's names and at DeepSpeed's path.

Nothing is gathered here. A parameter's *home* says where its values are; it is put on the parameter as an attribute
when something takes the parameter over, and whoever has it is asked each time, so that nothing goes stale and forward
and backward have nothing to update. What an operation gets whose parameter is elsewhere, `zero/units/released.py` says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import ModelError

from ..compat import without_overrides

#: Method by which an engine is known to floors that do not import its class.
OF_AN_ENGINE = "was_step_applied"
_ATTRIBUTE = "_dsrun_home"
_DATA: Any = Tensor.data


class ZeroParamStatus(Enum):
    """Whether a sharded parameter's values may be read; the values are DeepSpeed's."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ParameterOwner(ABC):
    """Where one parameter's values are.

    Attributes:
        number: number of the parameter, the same on every rank.
        name: name of the parameter, for messages.
    """

    number: int
    name: str

    @property
    @abstractmethod
    def keeper(self) -> OwnerGroup:
        """Who has the values of this parameter and of others."""

    @abstractmethod
    def status(self) -> ZeroParamStatus:
        """Whether the parameter may be read now."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether a `GatheredParameters` has the parameter whole now."""

    @property
    @abstractmethod
    def is_writable(self) -> bool:
        """Whether new values that are written to the parameter now are taken over."""

    @abstractmethod
    def own_piece(self) -> Tensor:
        """Returns this rank's part, flat, in the parameter's dtype; not to be written to."""

    @property
    def stays_gathered(self) -> bool:
        """Whether the parameter has memory of its own for its whole values from one update to the next; usually not."""
        return False

    def settle(self) -> None:
        """Returns when no update works on the parameter any more; by default none does behind its step."""
        return

    def check_copy(self) -> None:
        """Raises where a copy of the parameter would silently have other values; by default it shows in them."""
        return

    def hand_out(self, memory: Tensor) -> Tensor:
        """Returns what a script gets that asks for the parameter's `data`; by default the memory itself.

        Args:
            memory: memory that the parameter has now.
        """
        return memory

    def wait_update(self) -> None:
        """Returns when the parameter may be read where it lies; by default no update is on its way."""
        return

    def read(self) -> Tensor:
        """Returns a copy of the whole values, with a gradient where torch records; every rank must call."""
        raise AssertionError("the parameter is nobody's to read for another")

    def write(self, value: Tensor) -> None:
        """Takes whole new values over, in place; every rank must call."""
        raise AssertionError("the parameter is nobody's to write for another")

    def replace(self, value: Tensor) -> None:
        """Takes whole new values over, as where a script gives the parameter other memory; every rank must call."""
        raise AssertionError("the parameter is nobody's to write for another")

    def note_moved(self) -> None:
        """A script has given the parameter other memory; by default that is nobody's business."""
        return

    def bring_back(self) -> bool:
        """Takes over the values of other memory that a script has given the parameter; whether that could be done."""
        return False

    def moment(self) -> tuple[int, int]:
        """Returns how often the parameter was given other memory, and how often values have changed."""
        return (0, 0)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A parameter that is pickled leaves its home behind: process groups cannot travel."""
        return OrderedDict, ()


class OwnerGroup(ABC):
    """Who has the values of many parameters, as `GatheredParameters` asks."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks that the parameters lie on."""

    def check_modifier(self, homes: Sequence[Any], source: int) -> None:
        """Checks a rank that is to give others the values of parameters.

        Args:
            homes: homes of the parameters, all of this keeper.
            source: number of the rank.

        Raises:
            ModelError: there is no such rank.
        """
        del homes
        check_modifier(source, self.world_size)

    @abstractmethod
    def open(self, homes: Sequence[Any], *, writes: bool) -> None:
        """Makes parameters whole; every rank must call with the same ones. May be nested.

        Args:
            homes: homes of the parameters, all of this keeper.
            writes: whether the parameters get memory of their own, for new values.
        """

    @abstractmethod
    def close(self, homes: Sequence[Any], *, source: int | None, failed: bool) -> None:
        """Ends one `open`.

        Args:
            homes: homes of the parameters, the same as for `open`.
            source: rank whose values are taken over; None: nothing has changed.
            failed: whether this rank gave up; if so, no new values are taken over on any rank.
        """


def check_modifier(source: int, size: int) -> None:
    """Refuses a number that is none of so many ranks.

    Raises:
        ModelError: naming the ranks that there are.
    """
    if not 0 <= source < size:
        raise ModelError(
            f"GatheredParameters: modifier_rank is {source}; the ranks are 0 to {size - 1}",
            hint="pass the rank whose values shall be kept, or None to read only",
        )


class EngineParameter(nn.Parameter):
    """A parameter that an engine trains. Kernels and torch treat it as any other; copies of it are ordinary ones.

    A class of its own for its `data`: what a script writes there, torch does not count as a change of the parameter.
    """

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parameter's memory without its history, as on any tensor; what is written to it is taken over."""
        home = home_of(self)
        memory = memory_of(self)
        return memory if home is None else home.hand_out(memory)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Gives the parameter other memory, as on any tensor; the engine takes the values over when it next looks."""
        set_memory(self, value)
        home = home_of(self)
        if home is not None:
            home.note_moved()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the values, where they are there, into an ordinary parameter.

        Scripts for DeepSpeed that find no elements in a parameter gather it before they copy it (PEFT). They find all
        of them here: so their copies are gathered, which every rank must make.
        """
        whole = _whole_copy(self, gathers=stands_for_deepspeed())
        if whole is None:
            return super().__deepcopy__(memo)
        return memo.setdefault(id(self), whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values, where they are there, as those of an ordinary parameter."""
        whole = _whole_copy(self)  # and not a view, which would take along what was gathered with it
        return super().__reduce_ex__(protocol) if whole is None else whole.__reduce_ex__(protocol)


class ShardedParameter(EngineParameter):
    """A parameter of which a rank holds a piece. Its `shape` stays the whole one, also while the values are elsewhere.

    A class of its own, and not attributes, for what it says changes with every gather. Kernels treat it as a parameter.
    """

    @property
    def ds_id(self) -> int:
        """Number of the parameter."""
        return _home(self).number

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values may be read now."""
        return _home(self).status()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        return self.numel()

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's piece, flat; it may have no elements. It cannot be given other memory, see `ParameterPiece`."""
        home = _home(self)
        piece: Any = home.own_piece().as_subclass(ParameterPiece)
        piece.name_of_parameter = home.name
        return piece

    @property
    def ds_persist(self) -> bool:
        """Whether it is small enough to stay whole between updates, by `stage3_param_persistence_threshold`."""
        return _home(self).stays_gathered

    def partition_numel(self) -> int:
        """Elements of this rank's piece, which Lightning's summary of a model adds up."""
        return self.ds_tensor.numel()

    @property
    def ds_active_sub_modules(self) -> set[int]:
        """Modules that use the parameter now, for scripts that clear it: always empty, for units are followed here."""
        return set()


class ParameterPiece(Tensor):
    """A rank's piece of a parameter, as scripts see it: a plain tensor, but that its `data` cannot be other memory.

    Scripts move pieces off the device by `param.ds_tensor.data = ...` (ms-swift). Nothing would be freed by that here:
    pieces of many parameters lie in one buffer, which is the engine's.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore
    name_of_parameter: str

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The piece's memory."""
        return memory_of(self).as_subclass(Tensor)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Takes the memory that it has; refuses any other.

        Raises:
            ModelError: naming the parameter and the way out.
        """
        mine = memory_of(self)
        if _place_of(value) == _place_of(mine):
            return
        raise ModelError(
            f"model: `{self.name_of_parameter}`: ds_tensor.data is set to other memory "
            f"({_words(value)}, in place of {_words(mine)}), and a rank's piece lies in a buffer of the engine",
            hint="engine.offload_states() moves masters, optimizer states and gradients off the device until "
            "engine.reload_states(), and `zero_optimization.offload_param` keeps pieces in host memory; new values go "
            "into the parameter itself, inside dsrun.zero.GatheredParameters(param, modifier_rank=0)",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies the values into an ordinary tensor."""
        return memo.setdefault(id(self), self.data.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values as those of an ordinary tensor."""
        return self.data.clone().__reduce_ex__(protocol)


class UncutParameter(EngineParameter):
    """A frozen parameter that every rank has whole, beside others that are sharded: it says that its values are there.

    It has no `ds_id`: that there is one is how scripts tell parameters that they must gather.
    """

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values may be read now: always."""
        return ZeroParamStatus.AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the parameter."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the parameter."""
        return self.numel()

    @property
    def ds_tensor(self) -> Tensor:
        """The values, flat."""
        return self.data.reshape(-1)

    @property
    def ds_persist(self) -> bool:
        """Whether it stays whole between updates: always."""
        return True

    def partition_numel(self) -> int:
        """Elements of what this rank has: all."""
        return self.numel()


def memory_of(param: Tensor) -> Tensor:
    """Returns the memory that a parameter has now, whatever is in it, past what scripts get for `data`."""
    with without_overrides():
        return _DATA.__get__(param)


def set_memory(param: Tensor, memory: Tensor) -> None:
    """Gives a parameter other memory, past what scripts get for `data`."""
    with without_overrides():
        _DATA.__set__(param, memory)


def home_of(tensor: Tensor) -> ParameterOwner | None:
    """Returns the home of a parameter that has one."""
    found = getattr(tensor, _ATTRIBUTE, None)
    return found if isinstance(found, ParameterOwner) else None


def settle(param: nn.Parameter, home: ParameterOwner, *, sharded: bool, kind: type[nn.Parameter] | None = None) -> None:
    """Gives a parameter its home, and DeepSpeed's attributes if it is sharded.

    Parameters of a class of their own (quantised ones) keep it, and have a home only.

    Args:
        param: the parameter.
        home: home that the parameter gets.
        sharded: a rank has a piece of it.
        kind: class of it; None: the one that goes with `sharded`.
    """
    setattr(param, _ATTRIBUTE, home)
    if is_ordinary(param):
        set_class(param, kind or (ShardedParameter if sharded else nn.Parameter))


def unsettle(param: nn.Parameter) -> None:
    """Takes a parameter's home away."""
    if hasattr(param, _ATTRIBUTE):
        delattr(param, _ATTRIBUTE)
    if is_ordinary(param):
        set_class(param, nn.Parameter)


def is_ordinary(param: Tensor) -> bool:
    """Whether a parameter is one of torch's own class, or of ours in its place."""
    return type(param) is nn.Parameter or isinstance(param, EngineParameter)


def set_class(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Makes an ordinary parameter one of another of these classes; its identity, memory and history stay."""
    bare: Any = param
    bare.__class__ = kind


def is_zero_param(parameter: Tensor) -> bool:
    """Whether a tensor is a sharded parameter."""
    return hasattr(parameter, "ds_id")


def _whole_copy(param: nn.Parameter, *, gathers: bool = False) -> nn.Parameter | None:
    """Returns an ordinary parameter; None where the values are elsewhere, which then shows in the copy."""
    home = home_of(param)
    if home is None:
        return None
    if gathers and home.status() is not ZeroParamStatus.AVAILABLE:
        with torch.no_grad():
            return nn.Parameter(home.read(), requires_grad=param.requires_grad)
    home.check_copy()
    if home.status() is not ZeroParamStatus.AVAILABLE:
        return None
    return nn.Parameter(memory_of(param).clone(), requires_grad=param.requires_grad)


def _place_of(tensor: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.device


def _words(tensor: Tensor) -> str:
    return f"{tensor.numel()} of {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _home(param: ShardedParameter) -> ParameterOwner:
    home = home_of(param)
    if home is None:  # a copy of a sharded parameter
        raise AttributeError("this parameter is not sharded")
    return home
