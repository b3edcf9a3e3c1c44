"""The accelerator has DeepSpeed's methods, says what torch says, and does not have what means nothing here."""

from __future__ import annotations

import inspect
import os
import re

import pytest
import torch

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.runtime.accelerator import (
    DS_ACCELERATOR_ENV,
    Accelerator,
    get_accelerator,
    is_current_accelerator_supported,
)

#: The methods and properties of DeepSpeed 0.19.8's `abstract_accelerator`, as observed.
METHODS = frozenset(
    re.findall(
        r"\w+",
        """
    BFloat16Tensor ByteTensor DoubleTensor Event FloatTensor HalfTensor IntTensor LongTensor Stream available_memory
    build_extension capture_to_graph communication_backend_name create_graph create_op_builder current_device
    current_device_name current_stream default_generator default_stream device device_count device_name empty_cache
    export_envs get_compile_backend get_op_builder get_rng_state handles_memory_backpressure initial_seed is_available
    is_bf16_supported is_current_stream_capturing is_fp16_supported is_fp64_supported is_pinned
    is_synchronized_device is_triton_supported lazy_call manual_seed manual_seed_all max_memory_allocated
    max_memory_cached max_memory_reserved memory_allocated memory_cached memory_reserved memory_stats on_accelerator
    op_builder_dir pin_empty pin_empty_like pin_memory prefer_triton_grouped_mm random range_pop range_push
    register_host_memory replay_graph reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats
    resolves_data_dependency set_compile_backend set_device set_rng_state set_visible_devices_envs stream
    supported_dtypes synchronize total_memory unpin_memory unregister_host_memory use_host_timers visible_devices_envs
    """,
    )
)


def check(accelerator: Accelerator) -> None:
    """Calls what any device has; each value is torch's own or follows from it."""
    device = torch.device(accelerator.current_device_name())
    assert device.type == accelerator._name == accelerator.device_name()
    assert accelerator.is_available()
    assert accelerator.device_count() >= 1
    made = accelerator.FloatTensor([1.0, 2.0])
    assert (made.dtype, accelerator.on_accelerator(made)) == (torch.float32, True)
    dtypes = (torch.bfloat16, torch.uint8, torch.double, torch.half, torch.int, torch.long)
    makers = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "HalfTensor", "IntTensor", "LongTensor")
    assert tuple(getattr(accelerator, name)([1]).dtype for name in makers) == dtypes
    state = accelerator.get_rng_state()
    accelerator.manual_seed(7)
    first = torch.rand(3, device=device)
    accelerator.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device=device), first)
    assert accelerator.initial_seed() == 7
    accelerator.set_rng_state(state)
    assert torch.equal(accelerator.get_rng_state(), state)
    assert isinstance(accelerator.default_generator(0), torch.Generator)
    accelerator.synchronize()
    accelerator.empty_cache()
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated()
    assert 0 < accelerator.memory_cached() <= accelerator.max_memory_cached()
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    assert "allocated_bytes.all.current" in accelerator.memory_stats()
    accelerator.reset_max_memory_allocated()
    with accelerator.stream(accelerator.current_stream()):
        accelerator.range_push("here")
        accelerator.range_pop()
    assert torch.float in accelerator.supported_dtypes()
    assert accelerator.is_synchronized_device() == (device.type == "cpu")
    assert accelerator.lazy_call(lambda: 3) == 3
    assert torch.equal(accelerator.pin_memory(torch.ones(3)), torch.ones(3))
    assert accelerator.pin_memory(torch.ones(3), make_copy=False).shape == (3,)
    environ: dict[str, str] = {}
    accelerator.set_visible_devices_envs(environ, [1, 3])
    assert environ == {"CUDA_VISIBLE_DEVICES": "1,3"}


def test_the_cpu_answers_as_torch_does() -> None:
    if torch.cuda.device_count():
        pytest.skip("there is a GPU, which a process's accelerator then is")
    accelerator = get_accelerator()
    assert accelerator is get_accelerator()
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.device_name(1) == "cpu"
    assert accelerator.current_device() == int(os.environ.get("LOCAL_RANK", "0"))
    check(accelerator)
    assert is_current_accelerator_supported()


def test_on_the_cpu_each_rank_of_a_host_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count():
        pytest.skip("there is a GPU, which a process's accelerator then is")
    accelerator = get_accelerator()
    assert accelerator.device_count() == 1
    place = RankInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, master_port=1)
    for name, value in place.to_env().items():
        monkeypatch.setenv(name, value)
    assert (accelerator.current_device(), accelerator.device_count()) == (1, 2)


def test_another_accelerator_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = get_accelerator().device_name()
    find = inspect.unwrap(get_accelerator)
    monkeypatch.setenv(DS_ACCELERATOR_ENV, there)
    assert find().device_name() == there
    monkeypatch.setenv(DS_ACCELERATOR_ENV, "xpu")
    with pytest.raises(InputError, match=f"DS_ACCELERATOR is 'xpu'; dsrun computes on {there} here"):
        find()


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.2)
def test_a_gpu_answers_as_torch_does() -> None:
    accelerator = get_accelerator()
    assert accelerator.communication_backend_name() == "nccl"
    assert accelerator.device_name(1) == "cuda:1"
    accelerator.set_device(0)
    assert (accelerator.current_device(), accelerator.device(0)) == (0, torch.device("cuda", 0))
    check(accelerator)
    assert accelerator.is_pinned(accelerator.pin_memory(torch.ones(3)))
    graph = accelerator.create_graph()
    made = accelerator.FloatTensor([1.0])
    with accelerator.capture_to_graph(graph):
        made += 1
    accelerator.replay_graph(graph)
    accelerator.synchronize()
    assert made.item() == 2


def test_each_of_deepspeeds_methods_is_there_or_refused_with_a_reason() -> None:
    accelerator = get_accelerator()
    missing = {name for name in METHODS if not hasattr(accelerator, name)}
    for name in missing:
        with pytest.raises(AttributeError, match=rf"get_accelerator\(\)\.{name} is not there: "):
            getattr(accelerator, name)
    assert len(METHODS - missing) >= 60
    with pytest.raises(AttributeError, match=r"get_accelerator\(\)\.no_such is not there$"):
        _ = accelerator.no_such
    assert not inspect.isabstract(type(accelerator))
