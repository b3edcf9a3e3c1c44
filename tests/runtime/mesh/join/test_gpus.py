"""Each rank finds its GPU, however many it sees, and two ranks never get the same one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.runtime.compat import HashStore
from dsrun.runtime.mesh.join.gpus import choose_device, claim_gpu, gpu_index, gpu_name
from support.cli import clean_environment

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.mark.parametrize(("local_rank", "count", "index"), [(3, 4, 3), (0, 4, 0), (3, 1, 0), (0, 1, 0), (3, 2, 3)])
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    local_rank: int, count: int, index: int
) -> None:
    assert gpu_index(local_rank, count) == index


@without_gpu
def test_a_rank_that_sees_no_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="local rank 0 has no GPU: 1 ranks and 0 visible GPUs"):
        choose_device("nccl", RankInfo())
    assert choose_device("gloo", RankInfo()) == torch.device("cpu")


def _rank(rank: int) -> RankInfo:
    return RankInfo(rank=rank, world_size=4, local_rank=rank, local_world_size=4)


def test_of_two_ranks_with_one_gpu_the_later_one_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    store = HashStore()
    claim_gpu(store, "GPU-a", _rank(2), host="node1")
    claim_gpu(store, "GPU-a", _rank(2), host="node1")  # who asks again is no other rank
    with pytest.raises(InputError) as caught:
        claim_gpu(store, "GPU-a", _rank(3), host="node1")
    assert str(caught.value) == (
        "rank 3 and rank 2 have the same GPU on node1, GPU-a: 4 ranks here, CUDA_VISIBLE_DEVICES='0'"
    )
    assert caught.value.hint is not None
    assert "srun --gpus-per-task=1" in caught.value.hint


def test_ranks_with_gpus_of_their_own_and_of_other_hosts_go_on() -> None:
    store = HashStore()
    for rank, (gpu, host) in enumerate([("GPU-a", "node1"), ("GPU-b", "node1"), ("GPU-a", "node2")]):
        claim_gpu(store, gpu, _rank(rank), host=host)


def test_a_slice_has_the_name_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4f2a,MIG-77b0")
    assert gpu_name(torch.device("cuda", 0)) == "MIG-4f2a"


_SECOND_OF_TWO = """
import json
from dsrun.contract.environment import RankInfo
from dsrun.runtime.mesh.join.gpus import choose_device, gpu_name
info = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
device = choose_device("nccl", info)
print(json.dumps([str(device), gpu_name(device)]))
"""


@pytest.mark.cuda
@pytest.mark.gpu_seconds(5)
def test_the_second_rank_takes_the_one_gpu_that_it_is_shown() -> None:
    seen = gpu_name(torch.device("cuda", 0))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = {**clean_environment(), "CUDA_VISIBLE_DEVICES": shown}
    run = subprocess.run(
        [sys.executable, "-c", _SECOND_OF_TWO], capture_output=True, text=True, timeout=60, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == ["cuda:0", seen]
