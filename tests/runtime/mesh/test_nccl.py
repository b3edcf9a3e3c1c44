"""Every collective that the runtime uses, through torch.distributed on a world of one: NCCL on a GPU, Gloo elsewhere.

A rank alone takes `AloneCollectives`, so nothing else calls NCCL on a machine with one GPU. Values of one rank are
simple; that calls, dtypes and places in memory are taken at all is what is proved. All tests here share one world, for
to connect takes NCCL longer than a test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.runtime.compat import backends_of
from dsrun.runtime.mesh.agree.same import attempt, check_agreement, largest
from dsrun.runtime.mesh.c10d import C10dCollectives
from dsrun.runtime.mesh.collectives import WaitKind, WaitObserver, own_slice
from dsrun.runtime.mesh.join.backends import Backend
from dsrun.runtime.mesh.join.groups import ProcessGroupMesh, join, leave, make_mesh, separate_reductions
from dsrun.runtime.mesh.wait_times import WaitTimes

NUMEL = 1024
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
pytestmark = pytest.mark.gpu_seconds(0.1)


def backend_for(device: torch.device) -> Backend:
    return "nccl" if device.type == "cuda" else "gloo"


class Heard:
    """Notes what an observer is told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.waited_s = 0.0

    def enter(self, collective: str, kind: WaitKind) -> None:
        self.words.append(collective)

    def leave(self, waited_s: float) -> None:
        self.waited_s += waited_s


#: Groups for reductions beside the world that is joined, by its backend.
_REDUCTIONS: dict[Backend, dist.ProcessGroup] = {}


def leave_world() -> None:
    _REDUCTIONS.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """The world that the tests here share; `axis_on` joins it."""
    yield
    leave_world()


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, world: None) -> Iterator[None]:
    """In place of the one that leaves behind every test: only behind one that failed, for that may have broken it."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        leave_world()


def axis_on(device: torch.device, heard: WaitObserver | None = None) -> C10dCollectives:
    """The axis of a world of one, with a group for reductions."""
    backend = backend_for(device)
    if backend not in _REDUCTIONS:
        leave_world()
        join(RankInfo(), backend=backend, device=device, timeout_s=30)
        made = dist.new_group([0])
        assert isinstance(made, dist.ProcessGroup)
        _REDUCTIONS[backend] = made
    whole = dist.group.WORLD
    assert isinstance(whole, dist.ProcessGroup)
    return C10dCollectives(whole, heard, reductions=_REDUCTIONS[backend], device=device)


def values(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(NUMEL, device=device).remainder(97).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64])
def test_a_gather_in_place_and_out_of_place(device: torch.device, dtype: torch.dtype) -> None:
    axis = axis_on(device)
    expected = values(dtype, device)
    # Inside of more memory, as a unit lies in a slot.
    around = torch.zeros(3 * NUMEL, dtype=dtype, device=device)
    output = around[NUMEL : 2 * NUMEL]
    axis.all_gather(output, expected.clone(), label="unit 1").wait()
    assert torch.equal(output, expected)
    axis.all_gather(output, own_slice(output, rank=0, size=1), label="unit 1").wait()
    assert torch.equal(output, expected)
    assert not around[:NUMEL].any()
    assert not around[2 * NUMEL :].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_reduce_scatter_in_place(device: torch.device, dtype: torch.dtype) -> None:
    axis = axis_on(device)
    buffer = values(dtype, device)
    axis.reduce_scatter(buffer, label="unit 1").wait()
    assert torch.equal(own_slice(buffer, rank=0, size=1), values(dtype, device))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *(("sum", dtype) for dtype in [*FLOATS, torch.float64, torch.int64]),
        *(("max", dtype) for dtype in [torch.float64, torch.int64]),
    ],
)
def test_an_all_reduce(device: torch.device, op: str, dtype: torch.dtype) -> None:
    axis = axis_on(device)
    buffer = values(dtype, device)
    buffer[:2] = torch.tensor([-3, -1]).to(device, dtype)
    expected = buffer.clone()
    axis.all_reduce(buffer, op=op, label="unit 1").wait()
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64])
def test_a_broadcast(device: torch.device, dtype: torch.dtype) -> None:
    axis = axis_on(device)
    buffer = values(dtype, device)
    axis.broadcast(buffer, source=0, label="unit 1").wait()
    assert torch.equal(buffer, values(dtype, device))


@pytest.mark.parametrize("numels", [None, [NUMEL]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_an_exchange_with_parts_of_given_and_of_even_length(
    device: torch.device, dtype: torch.dtype, numels: list[int] | None
) -> None:
    axis = axis_on(device)
    output = torch.zeros(NUMEL, dtype=dtype, device=device)
    axis.all_to_all(output, values(dtype, device), receive_numels=numels, send_numels=numels, label="tokens").wait()
    assert torch.equal(output, values(dtype, device))


def test_an_exchange_of_nothing(device: torch.device) -> None:
    axis = axis_on(device)
    output = torch.zeros(0, device=device)
    axis.all_to_all(output, torch.zeros(0, device=device), receive_numels=[0], send_numels=[0]).wait()
    assert axis.is_idle


def test_what_was_not_waited_for_ends(device: torch.device) -> None:
    axis = axis_on(device)
    ahead = axis.all_gather(torch.zeros(NUMEL, device=device), torch.ones(NUMEL, device=device), label="unit 1")
    assert axis.becomes_idle(patience_s=10)
    ahead.wait()
    assert axis.is_idle


def test_ranks_agree_and_tell_their_failures(device: torch.device) -> None:
    axis = axis_on(device)
    check_agreement({"the model": [1, 2], "data": None}, axis, device=device)
    assert largest([1.5, -2.0], axis, device=device, label="room") == [1.5, -2.0]

    def fail() -> None:
        raise OSError("no room")

    failure = attempt(fail, axis, device=device, label="save")
    assert failure is not None
    assert str(failure.error) == "no room"
    assert attempt(lambda: None, axis, device=device, label="save") is None


def mesh_on(device: torch.device) -> ProcessGroupMesh:
    mesh = make_mesh(divide(1, {}), RankInfo(), device=device, groups_of_one=True)
    separate_reductions(mesh)
    return mesh


@pytest.mark.gpu_seconds(2.5)
def test_groups_are_joined_left_and_joined_again(device: torch.device) -> None:
    leave_world()
    for _ in range(2):
        join(RankInfo(), backend=backend_for(device), device=device, timeout_s=30)
        assert backends_of()[device.type] == backend_for(device)
        first, second = mesh_on(device), mesh_on(device)
        for mesh in (first, second):
            axis = mesh.world
            assert isinstance(axis, C10dCollectives)
            assert (axis.reductions is axis.group) == (device.type == "cpu")
            buffer = axis.zeros(NUMEL, dtype=torch.float32, device=device).fill_(2)
            axis.reduce_scatter(buffer).wait()
            axis.all_gather(buffer, buffer).wait()
            axis.barrier()
            assert torch.equal(buffer, torch.full_like(buffer, 2))
            leave(mesh)
        assert not dist.is_initialized()


@pytest.mark.gpu_seconds(1)  # connects anew behind the one before
def test_a_barrier_is_over_when_the_host_has_come_behind_it(device: torch.device) -> None:
    heard = Heard()
    axis = axis_on(device, heard)
    axis.barrier()  # which may load kernels
    heard.words.clear()
    axis.barrier()
    on_host = ["barrier"]
    assert heard.words == (on_host if device.type == "cpu" else [*on_host, "results of barrier, last begun barrier"])


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.6)
def test_a_barrier_stops_the_host_until_the_device_has_come() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    axis = axis_on(device)
    axis.barrier()
    begun = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    begun.record()
    torch.cuda._sleep(500_000_000)  # pyright: ignore
    ended.record()
    axis.barrier()
    assert ended.query(), "the barrier has returned before what was enqueued in front of it"


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.6)
def test_the_devices_own_work_is_no_wait_for_others_though_the_host_stands_still_for_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    waits = WaitTimes(HeartbeatWriter(None))
    axis = axis_on(device, waits)
    buffer = values(torch.float64, device)
    axis.all_reduce(buffer, label="gradient norm").wait()
    with axis.reading("gradient norm"):
        buffer[0].item()
    before = waits.snapshot()
    begun = time.perf_counter()
    torch.cuda._sleep(500_000_000)  # pyright: ignore
    axis.all_reduce(buffer, label="gradient norm").wait()
    with axis.reading("gradient norm"):
        buffer[0].item()
    # Less than 0.1 s would be a device of 5 GHz.
    assert time.perf_counter() - begun > 0.1
    # Alone in its group a rank waits for nobody.
    waited = waits.snapshot()["all_reduce of gradient norm"]
    assert waited.calls == before["all_reduce of gradient norm"].calls + 1
    assert waited.seconds - before["all_reduce of gradient norm"].seconds < 0.05
    assert waits.unread == 0
