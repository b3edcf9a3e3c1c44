"""Reading other tools' pickles without running what they say.

[Note: what a pickle may name]
A pickle is a program: it names functions and calls them. Here torch's own interpreter reads it (`weights_only`), which
builds tensors, numbers, text and containers and nothing else. Classes that DeepSpeed's files name are put there by
`Inert`, which keeps what it is given and does nothing. A file that names anything else is not read: the error says
what it names, and who imports may have single names read as `Inert` too.

[Note: arrays in a pickle] numpy's arrays are data as tensors are, and scripts save them. Their three functions are the
real ones. What torch fills after making is told by its class, so the classes of plain dtypes are known to it, and that
of arrays of objects is not.

[Note: getattr of an enum] Python 3.11.0 to 3.11.3 pickles the member of an enum as `getattr(class, name)`; others do as
`class(value)`. `_EnumGetattr` stands for that `getattr`. It knows the members of the enums that files name, gives what
the other form gives, and refuses everything else.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, ClassVar

import numpy as np
import torch

from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular

#: As protocols 2 and 4 name it.
_GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})
_HINT = "if the import needs none of it, pass `--ignore NAME` for each: it is then read as nothing, and not run"


class Inert:
    """Stands for an object of a class that is not imported: `given` is what it was to be made of."""

    given: tuple[Any, ...]
    state: Any

    def __new__(cls, *given: Any) -> Inert:
        """Makes one of what it is given: pickles make objects in this way, too, and then call no `__init__`."""
        made = super().__new__(cls)
        made.given, made.state = given, None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keeps what the object was to be filled with."""
        self.state = state

    def value(self, name: str) -> Any:
        """Returns what the attribute would be; None where it is not known."""
        return self.state.get(name) if isinstance(self.state, dict) else None

    def __getitem__(self, name: str) -> Any:
        """Returns what the attribute is.

        Raises:
            KeyError: the object has none of this name.
        """
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


class InertEnum(Inert):
    """Stands for a member of an enum, of which `given` is the value; a subclass stands for one enum.

    Attributes:
        members: value by name.
    """

    members: ClassVar[Mapping[str, int]]


class _MemoryFormat(InertEnum):
    """Of torch/distributed/checkpoint/metadata.py."""

    members = MappingProxyType({"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2})


class _ZeroStage(InertEnum):
    """Of deepspeed/runtime/zero/config.py."""

    members = MappingProxyType({"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3})


_ENUMS: Mapping[str, type[InertEnum]] = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _MemoryFormat,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _ZeroStage,
}
#: What DeepSpeed's own checkpoints name.
_OF_DEEPSPEED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)


#: See [Note: arrays in a pickle]; numpy 1 and 2 name them differently.
_ARRAY_PARTS = frozenset(
    {
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    }
)
_ARRAY_DTYPES = "?bBhHiIlLqQefdFD"


class _EnumGetattr:
    """Stands for `getattr`, see [Note: getattr of an enum]; it has nothing that a pickle could fill or change."""

    __slots__ = ()

    def __call__(self, owner: Any, name: Any) -> Inert:
        """Returns the member of an enum that a pickle asks for.

        Args:
            owner: object from which the pickle asks for an attribute.
            name: name of the attribute that the pickle asks for.

        Raises:
            ValueError: it is no member of an enum that is known; no attribute was looked up.
        """
        if not (isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str)):
            raise ValueError("it calls `getattr` on something else than an enum; it was not called")
        if not issubclass(owner, InertEnum):
            # A class of the user's that is ignored, as `class(value)` of it would be.
            return owner(name)
        if name not in owner.members:
            raise ValueError(f"it calls `getattr` for {name[:80]!r}, which is no member of the enum; it was not called")
        return owner(owner.members[name])


_ENUM_GETATTR = _EnumGetattr()


def _stand_in(name: str) -> Callable[..., Any]:
    """Returns what a name in a pickle stands for here."""
    if name in _ARRAY_PARTS:
        return _array_part(name)
    return _ENUM_GETATTR if name in _GETATTR else _ENUMS.get(name, Inert)


def _array_part(name: str) -> Callable[..., Any]:
    match name.rpartition(".")[2]:
        case "ndarray":
            return np.ndarray
        case "dtype":
            return np.dtype
        case "scalar":
            made: Any = np.float64(0).__reduce__()[0]
        case _:
            made = np.empty(0).__reduce__()[0]
    return made


def _allowed(named: Collection[str]) -> list[tuple[Callable[..., Any], str] | Callable[..., Any]]:
    """Returns what torch's reader is told of: what each name stands for."""
    allowed: list[tuple[Callable[..., Any], str] | Callable[..., Any]] = [(_stand_in(name), name) for name in named]
    if not _ARRAY_PARTS.isdisjoint(named):
        allowed += [type(np.dtype(letter)) for letter in _ARRAY_DTYPES]
    return allowed


def read_torch_file(path: Path, *, ignored: Collection[str] | None) -> Any:
    """Returns what a torch file holds, on the CPU, tensors mapped from the file; see [Note: what a pickle may name].

    Args:
        path: the file.
        ignored: names that are read as `Inert`, in addition to DeepSpeed's own; None: all that are not known, for
            whoever wants nothing of them.

    Raises:
        CheckpointError: it cannot be read, or it names something else.
    """
    return _read(str(path), path, ignored=ignored)


def read_torch_bytes(data: bytes, path: Path, *, ignored: Collection[str]) -> Any:
    """Returns what a part of a file holds, that is a torch file itself.

    Args:
        data: the part.
        path: the whole file, for messages.
        ignored: names that are read as `Inert`, in addition to DeepSpeed's own; see `read_torch_file`.

    Raises:
        CheckpointError: likewise.
    """
    return _read(io.BytesIO(data), path, ignored=ignored)


def _read(source: str | io.BytesIO, path: Path, *, ignored: Collection[str] | None) -> Any:
    try:
        if isinstance(source, str):
            os.close(open_regular(source))  # torch would wait for a pipe
        named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if ignored is not None:
            refuse_unknown(path, set(named) - _OF_DEEPSPEED - _ARRAY_PARTS - _GETATTR - set(ignored))
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals(_allowed(named)):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, str))
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        text = str(error).splitlines()[0] if str(error) else repr(error)
        raise CheckpointError(f"{path}: cannot be read: {text}") from error


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of which only the shape of its data is wanted: every name that is known becomes `Inert` or data.

    Args:
        file: the pickle, open.
        path: its name, for messages.
        known: names that the pickle may contain; each is read as `Inert`.
        data: names in the pickle, each mapped to the value or plain container that it stands for.
    """

    def __init__(self, file: IO[bytes], path: Path, *, known: Collection[str], data: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._path = path
        self._known = known
        self._data = data

    def find_class(self, module: str, name: str, /) -> Any:
        """Returns what stands for a name; nothing is imported.

        Raises:
            CheckpointError: it is not known.
        """
        whole = f"{module}.{name}"
        if whole in self._data:
            return self._data[whole]
        refuse_unknown(self._path, {whole} - set(self._known) - _GETATTR)
        return _stand_in(whole)


def refuse_unknown(path: Path, unknown: Set[str]) -> None:
    """Raises where a pickle names what is not known.

    Raises:
        CheckpointError: listing the names.
    """
    if unknown:
        raise CheckpointError(
            f"{path}: its pickle names {', '.join(f'`{name}`' for name in sorted(unknown))}, which reading it as "
            "torch or Python do by default would execute; nothing was executed",
            hint=_HINT,
        )
