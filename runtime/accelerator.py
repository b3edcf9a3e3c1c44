"""`get_accelerator()`: the device that this process computes on, with the methods of DeepSpeed's accelerators.

For scripts that ask by DeepSpeed's words; dsrun itself asks torch. A GPU of CUDA's (or ROCm's) where this process sees
one, else the CPU. Whether there is one is asked once, and opens no GPU where the driver's library can be asked instead.
What no device of dsrun's has (compiled operations and their builders) is no attribute, so that `hasattr` says so.
"""

from __future__ import annotations

import functools
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.cuda import nccl

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError

#: DeepSpeed's variable, by which a user names the accelerator.
DS_ACCELERATOR_ENV = "DS_ACCELERATOR"
_NOT_COMPILED = "nothing is compiled; dsrun.ops has the optimizers"
#: Names of DeepSpeed's that are not here, and why.
_MISSING = {
    "build_extension": _NOT_COMPILED,
    "create_op_builder": _NOT_COMPILED,
    "get_op_builder": _NOT_COMPILED,
    "op_builder_dir": _NOT_COMPILED,
    "pin_empty": "torch.empty(..., pin_memory=True) does it",
    "pin_empty_like": "torch.empty_like(..., pin_memory=True) does it",
    "pin_memory_alignment": "torch aligns the memory that it locks",
    "prefer_triton_grouped_mm": "dsrun has no kernels for experts",
    "register_host_memory": "tensor.pin_memory() locks pages",
    "set_compile_backend": "the config's section `compile` names torch.compile's backend",
    "unpin_memory": "pages are unlocked with their tensor's end",
    "unregister_host_memory": "tensor.pin_memory() locks pages",
}


class Accelerator(ABC):
    """A kind of device. The names are DeepSpeed's; `device_index` None is the current device.

    Args:
        name: name of the kind, as torch calls it.
        backend: backend by which ranks talk.
    """

    def __init__(self, name: str, backend: str) -> None:
        self._name = name
        self._communication_backend_name = backend
        self._compile_backend = "inductor"
        self._module: Any = torch.get_device_module(name)

    def __getattr__(self, name: str) -> Any:
        reason = _MISSING.get(name)
        raise AttributeError(f"get_accelerator().{name} is not there" + (f": {reason}" if reason else ""))

    # Which device.

    def device_name(self, device_index: int | None = None) -> str:
        """Returns `cuda`, `cuda:1` or `cpu`."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    @abstractmethod
    def device(self, device_index: int | None = None) -> Any:
        """Returns what may stand behind `with`, to compute on a device."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Makes a device the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """Returns the current device's index; on the CPU this process's rank among those of its host."""

    @abstractmethod
    def current_device_name(self) -> str:
        """Returns the current device's name, for `torch.device`."""

    def device_count(self) -> int:
        """Returns how many devices there are: as many as this host has ranks, where these compute on the CPU."""
        return self._module.device_count()

    def is_available(self) -> bool:
        """Whether there is such a device."""
        return self._module.is_available()

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for all work of a device."""
        self._module.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Whether work is done when its call returns: on the CPU."""
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        """See `is_synchronized_device`."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """See `is_synchronized_device`."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """See `is_synchronized_device`."""
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        """Returns `nccl` or `gloo`."""
        return self._communication_backend_name

    @abstractmethod
    def communication_backend_version(self) -> Any:
        """Returns NCCL's version; None for Gloo, which has none."""

    # Random numbers.

    def random(self) -> Any:
        """Returns `torch.random`."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Sets a generator's state."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Returns a generator's state."""

    @abstractmethod
    def manual_seed(self, seed: int) -> Any:
        """Seeds the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> Any:
        """Seeds the generators of all devices."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Returns the seed of the current device's generator."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Returns a device's generator."""

    # Streams and events: the CPU has none that order work, torch's stand-ins for it do nothing.

    @property
    def Stream(self) -> Any:
        """Class of a device's streams."""
        return self._module.Stream

    @property
    @abstractmethod
    def Event(self) -> Any:
        """Class of a device's events."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context in which work goes to a stream."""
        return nullcontext() if stream is None else self._module.stream(stream)

    @abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any:
        """Returns the stream that work goes to now."""

    @abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any:
        """Returns the stream that work goes to at first."""

    # Memory, in bytes: of tensors on a GPU; on the CPU of this process, and what is cached is what is allocated.

    @abstractmethod
    def empty_cache(self) -> None:
        """Gives memory back that no tensor has."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the memory of tensors now."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the most memory of tensors so far."""

    @abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Returns the memory that is taken from the device now, for tensors that are and that will be."""

    @abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Returns the most memory taken from the device so far."""

    @abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Returns the figures of the allocator, by torch's names."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begins to look for the most memory anew; not on the CPU, where the kernel has one figure for a process."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the memory of the device."""

    @abstractmethod
    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the memory of the device that is free."""

    def memory_cached(self, device_index: int | None = None) -> int:
        """See `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """See `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """See `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """See `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    # Numbers.

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """Whether the device computes in fp16."""

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in fp64."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes to train in."""
        halves = {torch.half: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float, *(dtype for dtype, is_there in halves.items() if is_there)]

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for the device."""
        return False

    def get_compile_backend(self) -> str:
        """Returns torch.compile's backend for the device."""
        return self._compile_backend

    # Constructors of tensors on the current device.

    @property
    def BFloat16Tensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of bf16."""
        return self._constructor(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of bytes."""
        return self._constructor(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of fp64."""
        return self._constructor(torch.double)

    @property
    def FloatTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of fp32."""
        return self._constructor(torch.float)

    @property
    def HalfTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of fp16."""
        return self._constructor(torch.half)

    @property
    def IntTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of int32."""
        return self._constructor(torch.int)

    @property
    def LongTensor(self) -> Callable[..., Tensor]:
        """Makes a tensor of int64."""
        return self._constructor(torch.long)

    def _constructor(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name

    @abstractmethod
    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Returns a tensor of locked pages; on the CPU, which needs none, the tensor itself.

        Args:
            tensor: tensor in host memory.
            make_copy: whether the new tensor has the same values.
            match_shape: DeepSpeed's argument, without effect: the shape is always the same.
        """

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's pages are locked."""
        return tensor.is_pinned()

    # Profilers' ranges, graphs and variables.

    @abstractmethod
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Begins a range of NVTX; nothing on the CPU."""

    @abstractmethod
    def range_pop(self, domain: Any = None) -> Any:
        """Ends a range of NVTX; nothing on the CPU."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls back, on a GPU after it was opened."""
        return callback()

    def is_current_stream_capturing(self) -> bool:
        """Whether work is captured to a graph now."""
        return False

    def create_graph(self) -> Any:
        """Returns a new graph; None on the CPU."""
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Returns a context in which work is captured to a graph; on the CPU it is done."""
        del graph, pool, stream
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Does what a graph has captured; nothing on the CPU, which captured none."""
        del graph

    def export_envs(self) -> list[str]:
        """Returns how the names of variables begin that all ranks need."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Returns the names of the variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Writes which devices a process is to see into its environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


class _Cuda(Accelerator):
    def __init__(self) -> None:
        super().__init__("cuda", "nccl")

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("cuda") if device_index is None else torch.device("cuda", device_index)

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_version(self) -> Any:
        return nccl.version()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> Any:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[device_index]

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def is_fp16_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 7

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 8

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        del match_shape
        return tensor.pin_memory() if make_copy else torch.empty_like(tensor, pin_memory=True)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        del domain, category
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        del domain
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        torch.cuda.init()
        return callback()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        return ["NCCL"]


class _Cpu(Accelerator):
    def __init__(self) -> None:
        super().__init__("cpu", "gloo")

    def device(self, device_index: int | None = None) -> Any:
        del device_index
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        del device_index

    def device_count(self) -> int:
        return RankInfo.from_env().local_world_size

    def current_device(self) -> int:
        return RankInfo.from_env().local_rank

    def current_device_name(self) -> str:
        return "cpu"

    def communication_backend_version(self) -> Any:
        return None

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        del device_index
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        del device_index
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        del device_index
        return torch.default_generator

    @property
    def Event(self) -> Any:
        return None

    def current_stream(self, device_index: int | None = None) -> Any:
        del device_index
        return None

    def default_stream(self, device_index: int | None = None) -> Any:
        del device_index
        return None

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device_index: int | None = None) -> int:
        del device_index
        return psutil.Process(os.getpid()).memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        # The kernel adds to its figures now and then, and not to both at once.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return max(most, self.memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(device_index),
            "allocated_bytes.all.peak": self.max_memory_allocated(device_index),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        del device_index

    def total_memory(self, device_index: int | None = None) -> int:
        del device_index
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        del device_index
        return psutil.virtual_memory().available

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        del make_copy, match_shape
        return tensor

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        del msg, domain, category

    def range_pop(self, domain: Any = None) -> Any:
        del domain


@functools.cache
def get_accelerator() -> Accelerator:
    """Returns this process's accelerator: that of CUDA where the process sees a GPU, else that of the CPU.

    Raises:
        InputError: DeepSpeed's variable DS_ACCELERATOR names another.
    """
    found = _Cuda() if torch.cuda.device_count() else _Cpu()
    wanted = os.environ.get(DS_ACCELERATOR_ENV) or found.device_name()
    if wanted != found.device_name():
        raise InputError(
            f"environment: {DS_ACCELERATOR_ENV} is {wanted!r}; dsrun computes on {found.device_name()} here",
            hint="unset it; `dsrun --no-gpu` hides the GPUs, so that ranks compute on the CPU",
        )
    return found


def is_current_accelerator_supported() -> bool:
    """Whether dsrun trains on this process's accelerator: it has no other."""
    return True
