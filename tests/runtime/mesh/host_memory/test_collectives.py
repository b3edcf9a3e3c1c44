"""Ranks of one host move data through memory they share: the same bits everywhere, whatever lies where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.errors import DsrunError, ModelError
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.host_memory.collectives import SharedMemoryCollectives
from dsrun.runtime.mesh.join.groups import join, make_mesh
from support.ranks import run_ranks, wait_for_all
from support.wait_seconds import WaitSeconds

CPU = torch.device("cpu")


def shared(timeout_s: float = 30) -> SharedMemoryCollectives:
    info = RankInfo.from_env()
    wait_for_all(info)
    join(info, backend="gloo", device=CPU, timeout_s=timeout_s)
    found = make_mesh(divide(info.world_size, {}), info, device=CPU).world
    assert isinstance(found, SharedMemoryCollectives), "ranks of one host share memory"
    return found


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_order(terms: list[Tensor]) -> Tensor:
    """The sum that is promised: in rank order, in fp32, rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def _move(numel: int, dtype: torch.dtype, mixed: bool) -> None:
    axis = shared()
    rank, size = axis.rank, axis.size
    make: Callable[[int], Tensor] = lambda n: axis.zeros(n, dtype=dtype, device=CPU)  # noqa: E731
    if mixed and rank == 0:
        # Every rank makes the memory; this one uses other.
        make = lambda n: torch.empty_like(axis.zeros(n, dtype=dtype, device=CPU))  # noqa: E731
    everyone = [values(peer, numel * size, dtype) for peer in range(size)]
    total = in_order(everyone)

    buffer = make(numel * size).copy_(everyone[rank])
    axis.reduce_scatter(buffer).wait()
    span = slice(rank * numel, (rank + 1) * numel)
    assert torch.equal(buffer[span], total[span])

    for op, expected in (("sum", total), ("max", torch.stack(everyone).amax(0))):
        buffer.copy_(everyone[rank])
        axis.all_reduce(buffer, op=op).wait()
        assert torch.equal(buffer, expected), op

    shard = make(numel).copy_(everyone[rank][:numel])
    into = torch.full((numel * size,), 9.0, dtype=dtype)
    axis.all_gather(into, shard).wait()
    assert torch.equal(into, torch.cat([each[:numel] for each in everyone]))

    buffer.copy_(everyone[rank])
    axis.broadcast(buffer, source=size - 1).wait()
    assert torch.equal(buffer, everyone[-1])

    dealt = torch.full_like(buffer, 9.0)
    axis.all_to_all(dealt, buffer.copy_(everyone[rank])).wait()
    assert torch.equal(dealt, torch.cat([each[span] for each in everyone]))
    # Nothing at all for rank 0.
    send = [peer * numel for peer in range(size)]
    whole = make(sum(send)).copy_(everyone[rank][: sum(send)])
    uneven = torch.full((size * rank * numel,), 9.0, dtype=dtype)
    axis.all_to_all(uneven, whole, receive_numels=[rank * numel] * size, send_numels=send).wait()
    start = sum(send[:rank])
    assert torch.equal(uneven, torch.cat([each[start : start + rank * numel] for each in everyone]))
    axis.close()


# Below and above what is added up by each rank, and what a mailbox holds; never a multiple of it.
@pytest.mark.parametrize("numel", [1, 1000, 90_001, 700_001])
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
@pytest.mark.parametrize("mixed", [False, True])
def test_every_collective_gives_the_promised_bits(numel: int, size: int, dtype: torch.dtype, mixed: bool) -> None:
    run_ranks(size, _move, numel, dtype, mixed)


def _ends_early(how: str) -> str:
    axis = shared(timeout_s=2)
    if axis.rank == 1:
        if how == "ends":
            os._exit(0)
        if how == "other length":
            with pytest.raises(ModelError) as refused:
                axis.all_to_all(
                    torch.zeros(2), torch.zeros(4), receive_numels=[1, 1], send_numels=[3, 1], label="experts"
                )
            return str(refused.value)
        if how == "other call":
            with pytest.raises(ModelError) as refused:
                axis.all_reduce(torch.zeros(8), label="unit 7")
            return str(refused.value)
        # It stays elsewhere until the other has given up and gone.
        for _ in range(3):
            with suppress(RuntimeError):
                torch.distributed.barrier()
        return ""
    if how == "other length":
        with pytest.raises(ModelError) as refused:
            axis.all_to_all(torch.zeros(3), torch.zeros(2), receive_numels=[1, 2], send_numels=[1, 1], label="experts")
        return str(refused.value)
    with pytest.raises(DsrunError) as caught:
        axis.all_gather(torch.zeros(16), torch.zeros(8), label="unit 4")
    return str(caught.value)


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_a_rank_in_another_collective_is_named_by_both() -> None:
    zero, one = run_ranks(2, _ends_early, "other call")
    assert zero == "rank 0 is in all_gather of unit 4 (32 bytes) while rank 1 is in all_reduce sum of unit 7 (32 bytes)"
    assert one == "rank 1 is in all_reduce sum of unit 7 (32 bytes) while rank 0 is in all_gather of unit 4 (32 bytes)"


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_parts_of_other_lengths_than_a_rank_expects_are_named_by_both() -> None:
    names = [text.partition(", in ")[0] for text in run_ranks(2, _ends_early, "other length")]
    assert names == ["rank 1 sends 3 elements to rank 0, which expects 2"] * 2


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_a_rank_that_does_not_come_is_named() -> None:
    zero, _ = run_ranks(2, _ends_early, "stays")
    assert zero.startswith("rank 0 waited 2 s for rank 1 of this host in all_gather of unit 4 (32 bytes)")


def _sees_the_end() -> str:
    """Rank 1 is a process below this one, so that the test's own ranks all end well."""
    axis = shared()
    parent = os.getpid()
    if axis.rank == 1:
        # The forkserver watches this process: it must come to its end by itself, but without a word to the others.
        return ""
    with pytest.raises(DsrunError) as caught:
        axis.barrier()
    assert os.getpid() == parent
    return str(caught.value)


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    zero, _ = run_ranks(2, _sees_the_end)
    assert (
        zero
        == "rank 1 of this host has ended while rank 0 waited for it in barrier (0 bytes); its last collective was none"
    )


def _holds() -> tuple[int, list[str]]:
    axis = shared()
    before = len(os.listdir("/proc/self/fd"))
    buffers = [axis.zeros(1000, dtype=torch.float32, device=CPU) for _ in range(200)]
    assert all(buffer.untyped_storage().nbytes() == 4000 for buffer in buffers)
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    axis.barrier()
    assert [int(buffer.sum()) for buffer in buffers] == [1000 * number for number in range(200)], "none overlap"
    names = Path("/proc/self/maps").read_text()
    named = [line for line in names.splitlines() if "dsrun" in line and "/memfd:dsrun (deleted)" in line]
    return len(os.listdir("/proc/self/fd")) - before, sorted({line.split(None, 5)[-1] for line in named})


def test_many_buffers_take_few_descriptors_and_no_name() -> None:
    for descriptors, names in run_ranks(2, _holds):
        assert descriptors <= 2
        assert names == ["/memfd:dsrun (deleted)"]


def _wait_observed() -> list[Any]:
    seen: list[Any] = []

    class Observer:
        def enter(self, collective: str, kind: WaitKind) -> None:
            seen.append(collective)

        def leave(self, waited_s: float) -> None:
            assert waited_s >= 0

    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    axis = make_mesh(divide(2, {}), info, device=CPU, observer=Observer()).world
    axis.all_reduce(torch.zeros(4), label="loss").wait()
    return seen


def test_waits_are_named_for_who_watches() -> None:
    assert run_ranks(2, _wait_observed) == [["all_reduce sum of loss"]] * 2


def _slow_at_its_own_part(is_shared: bool) -> float:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    seconds = WaitSeconds()
    axis = make_mesh(divide(info.world_size, {}), info, device=CPU, observer=seconds).world
    assert isinstance(axis, SharedMemoryCollectives)
    buffer = axis.zeros(512, dtype=torch.float32, device=CPU) if is_shared else torch.zeros(512)

    def fold(start: int, end: int, everyone: list[Tensor]) -> None:
        time.sleep(0.2 if info.rank == 1 else 0.0)

    axis.barrier()
    before_s = seconds.waited_s
    axis.fold(buffer, [(0, 256), (256, 512)], fold, collective="reduce_scatter", label="unit 3").wait()
    return seconds.waited_s - before_s


@pytest.mark.depends_on_speed("a rank that works for 200 ms waits less than 100 ms")
@pytest.mark.parametrize("is_shared", [True, False])
def test_what_a_rank_copies_and_adds_up_itself_is_no_wait(is_shared: bool) -> None:
    zero, one = run_ranks(2, _slow_at_its_own_part, is_shared)
    assert zero > 0.15, "it waits until the other one is done"
    assert one < 0.1, "it waits for nobody"
