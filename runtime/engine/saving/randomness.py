"""The random-number state of a rank for a checkpoint: as bytes and back, and what ranks take that there were not then.

Knows no file format and enters no collective. Covered are Python's, numpy's and torch's default generators, that of
the rank's device, and the named ones of `dsrun.checkpointing`; a generator of the script's own is the script's to keep.

[Note: random numbers on other ranks]
Of t ranks that share layers all draw alike, so what counts is the replica that a rank is of, r / t, and its place in
it, r mod t.
- As many ranks share layers as before: each rank that there was goes on with its own state, bit for bit.
- More or fewer do: all of a replica take the default generators of the first rank of the replica of that number.
- Of more replicas than the P that there were, replica p takes those of replica p mod P, generator by generator: as it
  is where replicas 0 and 1 had the same one, for a script that gives all ranks one seed may count on it, say to skip
  the same layers everywhere; else seeded by a hash of it and p.
- Named generators are taken of the rank at the same place in that replica. Of more places than the T that there were,
  place q takes those of place q mod T: as it is where places 0 and 1 had the same one, else seeded by a hash of it and
  q. Where T is 1, the one of Megatron's name (`model-parallel-rng`) is seeded so, and no other.
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

from ...activation.recompute.rng import MODEL_PARALLEL_NAME, RngTracker
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


@dataclass(frozen=True, slots=True)
class ResumedRank:
    """A rank that goes on from the states of some ranks, see [Note: random numbers on other ranks].

    Attributes:
        rank: rank that takes a state.
        tensor: number of ranks that share layers.
        saved: number of ranks that there were.
        saved_tensor: number of ranks that shared layers then.
    """

    rank: int
    tensor: int
    saved: int
    saved_tensor: int

    @property
    def replica(self) -> int:
        """Number of the replica that it is of."""
        return self.rank // self.tensor

    @property
    def place(self) -> int:
        """Place in the replica."""
        return self.rank % self.tensor

    @property
    def saved_replicas(self) -> int:
        """Number of replicas that there were."""
        return self.saved // self.saved_tensor

    def sources(self) -> tuple[int, ...]:
        """Returns the rank whose state it takes, or those that `adapted` needs, in its order."""
        if self.tensor == self.saved_tensor and self.rank < self.saved:
            return (self.rank,)
        first = self.replica % self.saved_replicas * self.saved_tensor
        second_replica = min(1, self.saved_replicas - 1) * self.saved_tensor
        return first, first + self.place % self.saved_tensor, 0, second_replica, min(1, self.saved_tensor - 1)


def adapted(states: Sequence[RandomState], rank: ResumedRank, device: torch.device) -> RandomState:
    """Returns the state that a rank takes, see [Note: random numbers on other ranks].

    Args:
        states: random-number states of the ranks that `rank.sources()` names, in its order.
        rank: rank that takes the state.
        device: device of the rank that takes the state.
    """
    if len(states) == 1:
        return states[0]
    mine, at_place, first, second, beside = (state._to_json() for state in states)  # pyright: ignore[reportPrivateUsage]
    mine["named"] = at_place["named"]
    is_new = rank.replica >= rank.saved_replicas
    seeds = {key: _seed(mine[key], key, str(rank.replica)) for key in mine if is_new and first[key] != second[key]}
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
            its, of_second, of_beside = (one["named"].get(name) for one in (first, second, beside))
            differs_by_place = name == MODEL_PARALLEL_NAME if rank.saved_tensor == 1 else its != of_beside
            who = str(rank.replica) if is_new and its != of_second else ""
            who += f"/{rank.place}" if rank.place >= rank.saved_tensor and differs_by_place else ""
            if who:
                generator = torch.Generator(device).manual_seed(_seed(state, name, who))
                mine["named"][name] = _to_text(generator.get_state())
    return RandomState._from_json(mine)  # pyright: ignore[reportPrivateUsage]


def _seed(state: object, label: str, who: str) -> int:
    digest = hashlib.sha256(f"{who}:{label}:{json.dumps(state, sort_keys=True)}".encode()).digest()
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
