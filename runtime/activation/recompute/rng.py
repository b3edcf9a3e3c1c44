"""Random numbers that come twice the same: what a forward drew, its recomputation draws again.

Generators are those of the CPU, of the devices that a call's tensors are on, and the named ones of `RngTracker`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.contract.environment import BACKEND_ENV
from dsrun.errors import ModelError

from ...mesh.join.backends import choose_backend
from ...mesh.join.groups import present_backend

#: The name under which Megatron and DeepSpeed keep the generator of tensor-parallel ranks.
MODEL_PARALLEL_NAME = "model-parallel-rng"
#: What Megatron and DeepSpeed add to the seed of tensor-parallel ranks.
_TENSOR_PARALLEL_OFFSET = 2718


@dataclass(frozen=True, slots=True)
class RngState:
    """States of generators at one moment.

    Attributes:
        cpu: state of the CPU's default generator.
        device_type: type of the devices in `devices`, such as `cuda`.
        devices: (index, state) of each.
        named: states of a tracker's named generators, by name.
    """

    cpu: Tensor
    device_type: str
    devices: tuple[tuple[int, Tensor], ...]
    named: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        states = [self.cpu, *(state for _, state in self.devices), *self.named.values()]
        return sum(state.nbytes for state in states)


def capture(tensors: Iterable[Tensor], tracker: RngTracker) -> RngState:
    """Notes the generators that a call with these tensors may draw from."""
    devices = sorted({(t.device.type, t.device.index or 0) for t in tensors if t.device.type not in ("cpu", "meta")})
    kind = devices[0][0] if devices else "cpu"
    module: Any = torch.get_device_module(kind) if devices else None
    states = tuple((index, module.get_rng_state(index)) for device, index in devices if device == kind)
    return RngState(torch.get_rng_state(), kind, states, tracker.get_states())


@contextmanager
def replayed(state: RngState, tracker: RngTracker) -> Generator[None]:
    """Inside, generators are where they were at `capture`; outside, nothing has been drawn."""
    indices = [index for index, _ in state.devices]
    kind = state.device_type if indices else "cuda"  # no device is forked where there is none to fork
    named = tracker.get_states()
    with torch.random.fork_rng(devices=indices, device_type=kind):
        torch.set_rng_state(state.cpu)
        if indices:
            module: Any = torch.get_device_module(kind)
            for index, device_state in state.devices:
                module.set_rng_state(device_state, index)
        tracker.set_states(state.named)
        try:
            yield
        finally:
            tracker.set_states(named)


class RngTracker:
    """Named generators, of which one takes the default generator's place for a while.

    As Megatron's and DeepSpeed's `CudaRNGStatesTracker`: tensor-parallel ranks draw the same numbers for what they
    hold together, and other ones, from a named generator, for what is cut. All of them are the current GPU's where this
    process trains on GPUs, else the CPU's; the first one that is added settles that.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all generators."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()
        self._default: _OfGpu | _OfCpu | None = None

    def get_states(self) -> dict[str, Tensor]:
        """Returns the states by name; they are replaced and never changed in place."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Takes over states that `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a generator.

        Raises:
            ModelError: the name or the seed is there already.
        """
        if seed in self._seeds or name in self._states:
            what = f"the seed {seed}" if seed in self._seeds else f"the name {name!r}"
            raise ModelError(f"get_cuda_rng_tracker().add: {what} is in use already", hint="call reset() first")
        self._seeds.add(seed)
        default = self._settled()
        before = default.state()
        default.seed(seed)
        self._states[name] = default.state()
        default.go_to(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_NAME) -> Generator[None]:
        """Inside, the default generator is the one of this name.

        Raises:
            ModelError: there is none of this name.
        """
        if name not in self._states:
            known = ", ".join(repr(known) for known in self._states) or "none"
            raise ModelError(
                f"get_cuda_rng_tracker().fork: there is no generator {name!r}; known: {known}",
                hint="call model_parallel_cuda_manual_seed(seed) or add(name, seed) first",
            )
        default = self._settled()
        before = default.state()
        default.go_to(self._states[name])
        try:
            yield
        finally:
            self._states[name] = default.state()
            default.go_to(before)

    def seed_ranks(self, seed: int, *, tensor_rank: int) -> None:
        """Seeds the default generator alike on all tensor-parallel ranks, and the named one differently."""
        self.reset()
        self._settled().seed(seed)
        self.add(MODEL_PARALLEL_NAME, seed + _TENSOR_PARALLEL_OFFSET + tensor_rank)

    def _settled(self) -> _OfGpu | _OfCpu:
        if self._default is None:
            self._default = _OfGpu() if _trains_on_gpus() else _OfCpu()
        return self._default


class _OfCpu:
    """The CPU's default generator."""

    def state(self) -> Tensor:
        return torch.default_generator.get_state()

    def go_to(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


class _OfGpu:
    """The current GPU's."""

    def state(self) -> Tensor:
        return torch.cuda.get_rng_state()

    def go_to(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)


def _trains_on_gpus() -> bool:
    """Whether this rank's device is a GPU; ranks of `--backend gloo` must not touch one that is there."""
    joined = dist.is_available() and dist.is_initialized()
    return (present_backend() if joined else choose_backend(os.environ.get(BACKEND_ENV))) == "nccl"
