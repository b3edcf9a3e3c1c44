"""What training goes by: as asked for, else as the group that the script joined has it."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsrun
from dsrun.config.axes import divide
from dsrun.contract.environment import BACKEND_ENV, RankInfo
from dsrun.errors import InputError
from dsrun.runtime.compat import HashStore, backends_of, timeout_of
from dsrun.runtime.mesh.join.backends import Backend, backend_of, idle_gpus_text, order_warning, serves
from dsrun.runtime.mesh.join.groups import join, make_mesh, present_backend

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize(
    ("parts", "has_gpu", "expected"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, True, "nccl"),
        ({"cpu": "gloo", "cuda": "nccl"}, False, "gloo"),
        ({"cuda": "nccl"}, True, "nccl"),
        ({"cpu": "gloo", "cuda": "gloo"}, True, "gloo"),
        ({"cpu": "gloo"}, True, "gloo"),
    ],
)
def test_nccl_is_taken_where_the_group_has_it_and_there_is_a_gpu(
    parts: dict[str, str], has_gpu: bool, expected: Backend
) -> None:
    assert backend_of(parts, has_gpu=lambda: has_gpu) == expected


def test_a_group_of_another_makers_devices_is_refused() -> None:
    with pytest.raises(InputError, match="the script has joined its ranks by xpu:xccl; dsrun trains on GPUs of NVIDIA"):
        backend_of({"xpu": "xccl"}, has_gpu=lambda: False)


def test_a_group_without_nccl_asks_for_no_gpu() -> None:
    # To ask is to make a context of CUDA's in processes that do without.
    assert backend_of({"cpu": "gloo"}, has_gpu=lambda: pytest.fail("asked")) == "gloo"


@pytest.mark.parametrize(
    ("parts", "by_nccl", "by_gloo"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, True, True),
        ({"cuda": "nccl"}, True, False),
        ({"cpu": "gloo", "cuda": "gloo"}, False, True),
    ],
)
def test_a_group_serves_the_backend_of_the_tensors_device(parts: dict[str, str], by_nccl: bool, by_gloo: bool) -> None:
    assert serves(parts, "nccl") == by_nccl
    assert serves(parts, "gloo") == by_gloo


def test_idle_gpus_are_told_with_both_ways_out() -> None:
    assert idle_gpus_text({"cpu": "gloo", "cuda": "gloo"}, gpus=8) == (
        "the script has joined its ranks by Gloo alone (cpu:gloo,cuda:gloo): they train on the CPU, and 8 visible GPUs "
        "are idle; join by `init_process_group()` or `dsrun.init_distributed()`, or start with `--backend nccl`; "
        "`--backend gloo` says that the CPU is meant"
    )


def test_a_variable_by_which_communicators_wait_for_each_other_is_named() -> None:
    assert order_warning({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}) is None
    warning = order_warning({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"})
    assert warning is not None
    assert warning.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: gathers and reductions")


def _join(backend: str | None) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


@without_gpu
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_a_script_that_joined_in_any_words_trains_on_the_cpu_without_a_gpu(backend: str | None) -> None:
    _join(backend)
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    assert backends_of(world)["cpu"] == "gloo"
    assert timeout_of(world) == 1800
    assert present_backend() == "gloo"
    engine = dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    assert engine.device == torch.device("cpu")
    engine.destroy()
    assert dist.is_initialized(), "the script's group is the script's to destroy"


@without_gpu
def test_asking_for_nccl_in_vain_is_an_error_in_a_group_of_the_script_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _join("gloo")
    monkeypatch.setenv(BACKEND_ENV, "nccl")
    with pytest.raises(InputError, match="backend is nccl, but torch sees no CUDA device"):
        present_backend()


def test_what_dsrun_joined_by_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    join(RankInfo(), backend="gloo", device=torch.device("cpu"), timeout_s=5)
    monkeypatch.setenv(BACKEND_ENV, "nccl")
    assert present_backend() == "gloo"


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.3)
@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl", "nccl"])
def test_a_script_that_joined_in_any_words_trains_on_its_gpu(backend: str | None) -> None:
    _join(backend)
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    assert timeout_of(world) > 0
    engine = dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    assert engine.device == torch.device("cuda", 0)
    engine.backward(engine(torch.ones(2, 4, device=engine.device)).sum())
    engine.step()
    engine.destroy()
    assert dist.is_initialized()


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.6)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_gloo_that_was_asked_for_counts_before_the_scripts_group(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_ENV, "gloo")
    _join(backend)
    engine = dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    assert engine.device == torch.device("cpu")
    mesh = make_mesh(divide(1, {}), RankInfo(), device=torch.device("cpu"), groups_of_one=True)
    value = torch.ones(4)
    mesh.world.all_reduce(value).wait()
    assert value.tolist() == [1, 1, 1, 1]


@pytest.mark.cuda
@pytest.mark.gpu_seconds(2)
def test_a_script_that_joined_by_gloo_alone_is_told_of_idle_gpus(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _join("gloo")
    with caplog.at_level(logging.WARNING):
        engine = dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
        dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)
    assert engine.device == torch.device("cpu")
    told = [record.getMessage() for record in caplog.records if "Gloo alone" in record.getMessage()]
    assert len(told) == 1
    assert "`--backend nccl`" in told[0]
    dist.destroy_process_group()
    # Then it is done: GPU tensors go by groups beside the script's.
    monkeypatch.setenv(BACKEND_ENV, "nccl")
    _join("gloo")
    assert os.environ[BACKEND_ENV] == present_backend()
    assert dsrun.initialize(model=nn.Linear(4, 4), config=CONFIG)[0].device == torch.device("cuda", 0)
