"""Speeds come out as what a link was made to give, and what was moved is counted."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from dsrun.direct_io.settings import IoSettings
from dsrun.runtime.memory.bus import InstantBus, ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.memory.measure import measure_bus, measure_step
from dsrun.runtime.offload.place.speeds import measure_buses

CPU = torch.device("cpu")


def pool() -> HostPool:
    return HostPool(None, say=print)


def test_a_link_is_no_faster_than_it_lets_through() -> None:
    pause = threading.Event()

    def pace(nbytes: int) -> None:
        pause.wait(0.02)

    speeds = measure_bus(ThreadBus(out_pace=pace, back_pace=pace), pool(), CPU, nbytes=1 << 20)
    assert 0 < speeds.out <= (1 << 20) / 0.02
    assert 0 < speeds.back <= (1 << 20) / 0.02


def test_what_is_moved_is_counted_as_states() -> None:
    bus = InstantBus()
    measure_bus(bus, pool(), CPU, nbytes=1 << 12)
    assert bus.counts.out["states"].nbytes == bus.counts.out_bytes == 4 << 12
    assert bus.counts.back["states"].nbytes == bus.counts.back_bytes == 4 << 12


def test_a_step_on_the_host_has_a_speed() -> None:
    assert measure_step(numel=1 << 12) > 0


def test_drives_are_measured_where_states_go_there(tmp_path: Path) -> None:
    speeds = measure_buses(InstantBus(), pool(), CPU, drives=[str(tmp_path)], io=IoSettings())
    assert all(speed and speed > 0 for speed in (speeds.out, speeds.back, speeds.host, speeds.disk_read))
    assert "disk write" in speeds.line()
    assert list(tmp_path.iterdir()) == []
