"""Reading other tools' pickles without running what they say.

[Note: what a pickle may name]
A pickle is a program: it names functions and calls them. Here torch's own interpreter reads it (`weights_only`), which
builds tensors, numbers, text and containers and nothing else. Classes that DeepSpeed's files name are put there by
`Inert`, which keeps what it is given and does nothing. A file that names anything else is not read: the error says
what it names, and who imports may have single names read as `Inert` too.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Set
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import CheckpointError

#: What DeepSpeed's own checkpoints name.
_OF_DEEPSPEED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
_HINT = "if the import needs none of it, pass `--ignore NAME` for each: it is then read as nothing, and not run"


class Inert:
    """Stands for an object of a class that is not imported: `given` is what it was to be made of."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keeps what the object was to be filled with."""
        self.state = state

    def value(self, name: str) -> Any:
        """Returns what the attribute would be; None where it is not known."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_torch_file(path: Path, *, ignored: Collection[str]) -> Any:
    """Returns what a torch file holds, on the CPU, tensors mapped from the file; see [Note: what a pickle may name].

    Args:
        path: the file.
        ignored: names that are read as `Inert` besides DeepSpeed's own.

    Raises:
        CheckpointError: it cannot be read, or it names something else.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        refuse_unknown(path, set(named) - _OF_DEEPSPEED - set(ignored))
        with torch.serialization.safe_globals([(Inert, name) for name in named]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


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
