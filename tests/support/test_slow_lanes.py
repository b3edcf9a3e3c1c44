"""Late buses copy what was to be copied, in order, and show it where somebody does not wait."""

from __future__ import annotations

import pytest
import torch

from support.slow_lanes import LateBus, SleepyBus, late_bus


def test_a_copy_is_made_when_it_is_waited_for_and_reads_its_source_then() -> None:
    bus = LateBus()
    device_N, host_N = torch.ones(4), torch.zeros(4)
    event = bus.start_out(device_N, host_N, kind="gradients")
    assert bool(host_N.isnan().all())
    assert (event.query(), bus.unmade) == (False, 1)
    device_N.fill_(2.0)
    event.synchronize()
    assert host_N.tolist() == [2.0] * 4, "a source that changes is seen"
    assert (event.query(), bus.unmade) == (True, 0)
    assert bus.counts.out["gradients"].calls == 1


def test_a_wait_of_the_device_frees_the_source_and_gives_the_host_nothing() -> None:
    bus = LateBus()
    device_N, host_N, back_N = torch.ones(4), torch.zeros(4), torch.zeros(4)
    event = bus.start_out(device_N, host_N, kind="gradients")
    bus.wait(event)
    device_N.fill_(2.0)
    assert bool(host_N.isnan().all())
    bus.wait(bus.start_back(host_N, back_N, kind="gradients"))
    assert back_N.tolist() == [1.0] * 4, "it comes behind that wait"
    assert host_N.tolist() == [1.0] * 4
    assert bus.unmade == 0


def test_copies_of_a_lane_keep_their_order_and_what_comes_after_another_copy_waits_for_it() -> None:
    bus = LateBus()
    device_N, host_N, back_N = torch.ones(2), torch.zeros(2), torch.zeros(2)
    first = bus.start_out(device_N, host_N, kind="states")
    back = bus.start_back(host_N, back_N, kind="states", after=[first])
    assert not back_N.isnan().any(), "it may still be read by what the copy comes after"
    again = bus.start_out(torch.full((2,), 7.0), host_N, kind="states", after=[back])
    again.synchronize()
    assert back_N.tolist() == [1.0, 1.0]
    assert host_N.tolist() == [7.0, 7.0]


def test_the_target_of_a_copy_is_nan_from_when_nothing_before_it_is_to_be_done() -> None:
    bus = LateBus()
    host_N, back_N = torch.ones(2), torch.zeros(2)
    back = bus.start_back(host_N, back_N, kind="states")
    bus.start_out(torch.zeros(2), host_N, kind="states", after=[back])
    bus.wait(back)
    assert back_N.tolist() == [1.0, 1.0]
    assert bool(host_N.isnan().all())
    bus.finish()
    assert host_N.tolist() == [0.0, 0.0]


@pytest.mark.cuda
def test_on_cuda_targets_are_nan_while_a_copy_sleeps_and_a_wait_orders_the_current_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def both_ways(cycles: int) -> tuple[list[bool], list[list[float]]]:
        bus = SleepyBus(device, cycles=cycles)
        host_N, threes_N = torch.zeros(4).pin_memory(), torch.full((4,), 3.0).pin_memory()
        device_N, back_N = torch.ones(4, device=device), torch.zeros(4, device=device)
        torch.cuda.synchronize(device)
        out = bus.start_out(device_N, host_N, kind="states")
        back = bus.start_back(threes_N, back_N, kind="states")
        early = bool(back_N.isnan().all()), bool(host_N.isnan().all()), out.query()
        bus.wait(back)
        came = back_N.tolist()
        out.synchronize()
        return list(early), [host_N.tolist(), came]

    both_ways(1)  # loads the kernels, for which CUDA may stop the host
    early, (there, came) = both_ways(200_000_000)
    assert early == [True, True, False]
    assert there == [1.0] * 4
    assert came == [3.0] * 4


def test_a_device_has_its_late_bus() -> None:
    assert isinstance(late_bus(torch.device("cpu")), LateBus)
