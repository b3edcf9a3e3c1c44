"""The random-number state of a rank for a checkpoint: as bytes and back, and what ranks take that there were not then.

Knows no file format and enters no collective. Covered are Python's, numpy's and torch's default generators, that of
the rank's device, and the named ones of `dsrun.checkpointing`; a generator of the script's own is the script's to keep.

[Note: random numbers on other ranks]
As many ranks as before, or fewer: each goes on with its own state, bit for bit. Of more, those that there were not
take the state of rank r mod R, generator by generator: as it is where ranks 0 and 1 had the same one, for a script that
gives all ranks one seed may count on it, say to skip the same layers everywhere; else seeded by a hash of it and the
rank.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import CheckpointError

from ...activation.recompute.rng import RngTracker
from ...generators import HostGenerators, capture_host, restore_host

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of a rank at one moment.

    Attributes:
        host: Python's, numpy's and torch's of the CPU.
        device: state of the default generator of the rank's device, uint8; None where that is the CPU.
        device_type: type of the rank's device.
        named: states of the named ones, which live on the accelerator where there is one.
    """

    host: HostGenerators
    device: Tensor | None
    device_type: str
    named: Mapping[str, Tensor]

    def to_bytes(self) -> bytes:
        """Returns it as JSON text: 15 KB, and as much as the named ones hold."""
        return json.dumps({"format": _FORMAT, **self._to_json()}).encode()

    def _to_json(self) -> dict[str, Any]:
        return {
            "python": _python_to_json(self.host.python),
            "numpy": _to_json(self.host.numpy),
            "torch": _to_text(self.host.torch),
            "device_type": self.device_type,
            "device": None if self.device is None else _to_text(self.device),
            "named": {name: _to_text(state) for name, state in self.named.items()},
        }

    @classmethod
    def from_bytes(cls, text: bytes) -> RandomState:
        """Reads what `to_bytes` returned.

        Raises:
            CheckpointError: it is something else, or of a later version.
        """
        try:
            found: Any = json.loads(text)
            if found["format"] != _FORMAT:
                raise ValueError(f"its format is {found['format']!r}; this version reads {_FORMAT}")
            return cls._from_json(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"random-number state: it cannot be read: {type(error).__name__}: {error}",
                hint="load another checkpoint, or this one with load_random_state=False",
            ) from error

    @classmethod
    def _from_json(cls, found: Mapping[str, Any]) -> RandomState:
        host = HostGenerators(
            _python_from_json(found["python"]), _from_json(found["numpy"]), _to_tensor(found["torch"])
        )
        device = None if found["device"] is None else _to_tensor(found["device"])
        named = {str(name): _to_tensor(state) for name, state in found["named"].items()}
        return cls(host, device, str(found["device_type"]), named)


def capture(device: torch.device, named: RngTracker) -> RandomState:
    """Returns the present state of this rank's generators; draws nothing, and waits for no device.

    Args:
        device: device of the rank.
        named: generators by name.
    """
    return RandomState(
        capture_host(),
        None if device.type == "cpu" else _module_of(device).get_rng_state(device),
        device.type,
        named.get_states(),
    )


def restore(state: RandomState, device: torch.device, named: RngTracker) -> None:
    """Puts a state back.

    Args:
        state: random-number state for this rank, see `adapted`.
        device: device of the rank; its generator and the named ones stay as they are where the state is of another
            device type.
        named: generators by name; those that the state does not have stay.

    Raises:
        CheckpointError: a generator does not take its state.
    """
    try:
        restore_host(state.host)
        if state.device_type == device.type:
            if state.device is not None:
                _module_of(device).set_rng_state(state.device, device)
            named.set_states({**named.get_states(), **state.named})
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"random-number state: a generator does not take it: {type(error).__name__}: {error}",
            hint="load another checkpoint, or this one with load_random_state=False",
        ) from error


def sources(rank: int, saved: int) -> tuple[int, ...]:
    """Returns the ranks whose states a rank needs, see [Note: random numbers on other ranks].

    Args:
        rank: rank that takes a state.
        saved: ranks that there were.
    """
    return (rank,) if rank < saved else (rank % saved, 0, min(1, saved - 1))


def adapted(states: Sequence[RandomState], rank: int, device: torch.device) -> RandomState:
    """Returns the state that a rank takes, see [Note: random numbers on other ranks].

    Args:
        states: random-number states of the ranks that `sources` names, in its order.
        rank: rank that takes the state.
        device: device of the rank that takes the state.
    """
    if len(states) == 1:
        return states[0]
    mine, first, second = (state._to_json() for state in states)  # pyright: ignore[reportPrivateUsage]
    seeds = {key: _seed(mine[key], key, rank) for key in mine if first[key] != second[key]}
    if "python" in seeds:
        mine["python"] = _python_to_json(random.Random(seeds["python"]).getstate())
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in seeds and numpy is not None:
        mine["numpy"] = _to_json(numpy.random.RandomState(seeds["numpy"]).get_state(legacy=False))
    if "torch" in seeds:
        mine["torch"] = _to_text(torch.Generator().manual_seed(seeds["torch"]).get_state())
    if states[0].device_type == device.type:
        if "device" in seeds and mine["device"] is not None:
            mine["device"] = _to_text(torch.Generator(device).manual_seed(seeds["device"]).get_state())
        for name, state in mine["named"].items():
            if first["named"].get(name) != second["named"].get(name):
                generator = torch.Generator(device).manual_seed(_seed(state, name, rank))
                mine["named"][name] = _to_text(generator.get_state())
    return RandomState._from_json(mine)  # pyright: ignore[reportPrivateUsage]


def _seed(state: object, label: str, rank: int) -> int:
    digest = hashlib.sha256(f"{rank}:{label}:{json.dumps(state, sort_keys=True)}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _python_to_json(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, pending = state
    return {"version": version, "words": base64.b64encode(array("I", words).tobytes()).decode(), "pending": pending}


def _python_from_json(found: Mapping[str, Any]) -> tuple[Any, ...]:
    words = array("I")
    words.frombytes(base64.b64decode(found["words"]))
    return found["version"], tuple(words), found["pending"]


def _to_json(value: Any) -> Any:
    """Numpy's state, whichever bit generator it is of: dicts, numbers and arrays."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(inner) for name, inner in value.items()}
    if hasattr(value, "dtype"):
        return {"dtype": str(value.dtype), "array": base64.b64encode(value.tobytes()).decode()}
    return value


def _from_json(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    if "array" not in found:
        return {name: _from_json(inner) for name, inner in found.items()}
    numpy: Any = sys.modules.get("numpy")
    # Where numpy is not loaded, nobody asks for its state.
    return None if numpy is None else numpy.frombuffer(base64.b64decode(found["array"]), dtype=found["dtype"])


def _to_text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _to_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
