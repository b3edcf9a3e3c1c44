"""Backends and devices are chosen, or refused with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dsrun.config.axes import divide
from dsrun.contract.environment import NONCE_KEY, RankInfo
from dsrun.errors import InputError, LaunchError
from dsrun.runtime.compat import TCPStore, store_of
from dsrun.runtime.mesh.join import groups
from dsrun.runtime.mesh.join.backends import choose_backend
from dsrun.runtime.mesh.join.gpus import choose_device
from dsrun.runtime.mesh.join.groups import join, make_mesh, present_backend
from support.forked_programs import Ended, run_programs
from support.ranks import run_ranks

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_nccl_without_a_gpu_is_refused_with_the_way_out() -> None:
    assert choose_backend(None) == "gloo"
    with pytest.raises(InputError, match="backend is nccl, but torch sees no CUDA device") as caught:
        choose_backend("nccl")
    assert caught.value.exit_code == 2
    assert caught.value.hint is not None
    assert "--backend gloo" in caught.value.hint
    with pytest.raises(InputError, match="local rank 0 has no GPU: 1 ranks and 0 visible GPUs"):
        choose_device("nccl", RankInfo())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match="backend is 'mpi'; expected nccl or gloo"):
        choose_backend("mpi")


def test_a_lone_process_joins_itself_and_a_second_join_does_nothing() -> None:
    for _ in range(2):
        join(RankInfo(), backend="gloo", device=torch.device("cpu"), timeout_s=5)
    assert dist.get_world_size() == 1
    assert present_backend() == "gloo"


def test_ranks_that_never_come_are_reported() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = RankInfo(rank=0, world_size=2, local_world_size=2, master_port=store.port, agent_store=True)
    with pytest.raises(LaunchError, match=r"rank 0 could not join the 2 ranks at 127\.0\.0\.1"):
        join(info, backend="gloo", device=torch.device("cpu"), timeout_s=1)


def _join_store_with(mark: str | None, *, nonce: str | None, timeout_s: float = 30) -> None:
    """Joins as the only rank of a job whose nonce is `nonce`, at a launcher's store that holds `mark`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if mark is not None:
        store.set(NONCE_KEY, mark)
    info = RankInfo(master_port=store.port, agent_store=True)
    try:
        join(info, backend="gloo", device=torch.device("cpu"), timeout_s=timeout_s, nonce=nonce)
    except LaunchError as error:
        raise LaunchError(str(error).replace(str(store.port), "PORT"), hint=error.hint) from error


def test_two_ranks_on_one_gpu_are_told_so_and_of_no_blocked_port(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = RankInfo(rank=0, world_size=2, local_world_size=2, master_port=store.port, agent_store=True)
    monkeypatch.setattr(groups, "gpu_name", lambda _: "GPU-a")
    claim = groups.claim_gpu

    def claim_after_another(store: dist.Store, gpu: str, info: RankInfo) -> None:
        claim(store, gpu, replace(info, rank=1))
        claim(store, gpu, info)

    monkeypatch.setattr(groups, "claim_gpu", claim_after_another)
    with pytest.raises(InputError, match="GPU-a") as refused:
        join(info, backend="nccl", device=torch.device("cpu"), timeout_s=5)
    assert refused.value.exit_code == 2


def test_a_rank_does_not_join_another_jobs_store() -> None:
    with pytest.raises(LaunchError) as caught:
        _join_store_with("theirs", nonce="ours")
    assert str(caught.value) == "rank 0: the store at 127.0.0.1:PORT is not this job's: it holds another job's mark"
    assert caught.value.hint is not None
    assert "another job's store answers" in caught.value.hint
    assert not dist.is_initialized()


def test_a_rank_does_not_join_a_store_without_a_mark_and_does_not_wait_for_ever() -> None:
    with pytest.raises(LaunchError, match=r"is not this job's: it holds no job's mark after 0\.2 s"):
        _join_store_with(None, nonce="ours", timeout_s=0.2)


@pytest.mark.parametrize(("mark", "nonce"), [("ours", "ours"), (None, None), ("theirs", None)])
def test_a_rank_joins_its_own_jobs_store_and_one_whose_launcher_leaves_no_mark(
    mark: str | None, nonce: str | None
) -> None:
    _join_store_with(mark, nonce=nonce)
    assert dist.get_world_size() == 1


def _joined_again() -> bool:
    """Joins, leaves a word in the group's store, and joins again; returns whether the word is there."""
    found = True
    for _ in range(2):
        info = RankInfo.from_env()
        join(info, backend="gloo", device=torch.device("cpu"), timeout_s=30)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        found = store_of(world).check(["address of a rank"])
        dist.barrier()
        store_of(world).set("address of a rank", "one where it listens no more")
        dist.destroy_process_group()
    return found


def test_a_group_that_is_joined_again_finds_nothing_of_the_one_before() -> None:
    assert run_ranks(2, _joined_again) == [False, False]


def _sums_over_peers() -> list[float]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=torch.device("cpu"), timeout_s=30)
    mesh = make_mesh(divide(4, {"tensor": 2}), info, device=torch.device("cpu"))
    sums: list[float] = []
    for peers in (mesh.batch, mesh.tensor, mesh.world):
        value = torch.tensor([float(10**info.rank)])
        peers.all_reduce(value).wait()
        sums.append(value.item())
    return sums


def test_every_role_has_its_own_ranks() -> None:
    assert run_ranks(4, _sums_over_peers) == [
        [101.0, 11.0, 1111.0],
        [1010.0, 11.0, 1111.0],
        [101.0, 1100.0, 1111.0],
        [1010.0, 1100.0, 1111.0],
    ]


_ENDING = """
import atexit
import torch, torch.distributed as dist
# Registered first, so called last.
atexit.register(lambda: print("group there" if dist.is_initialized() else "group left", flush=True))
import dsrun
model = torch.nn.Linear(4, 4)
settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine = dsrun.initialize(model=model, config=settings)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
"""


_ENDS = {"": 0, "engine.destroy()": 0, "raise SystemExit(7)": 7, "raise ValueError('no')": 1}


@pytest.fixture(scope="module")
def ends() -> dict[str, Ended]:
    """How the scripts ended, each a fork with torch, as ranks are."""
    return dict(zip(_ENDS, run_programs([_ENDING + last for last in _ENDS]), strict=True))


@pytest.mark.parametrize(("last", "code"), _ENDS.items())
def test_a_script_that_ends_lets_go_of_the_group_before_the_interpreter_ends(
    ends: dict[str, Ended], last: str, code: int
) -> None:
    end = ends[last]
    assert end.code == code, end.err
    assert "group left" in end.out.splitlines()
