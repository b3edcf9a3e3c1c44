"""A report names every arena with its figures, and what lies outside."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.memory.arenas import Arenas, OutsideUse


def test_the_report_names_every_arena() -> None:
    arenas = Arenas()
    masters = arenas.reserve("masters", 512, torch.zeros)
    spare = arenas.growing("moved-out gradients", lambda numel: torch.zeros(numel, dtype=torch.bfloat16))
    first, second = spare.take(256), spare.take(300)
    spare.give_back(first)
    assert arenas.holds(masters.take(300))
    assert arenas.holds(second)
    report = arenas.report([OutsideUse("frozen parameters", 3 << 20)])
    assert [(use.name, use.used_bytes) for use in report.arenas] == [("masters", 2048), ("moved-out gradients", 1024)]
    assert report.reserved_bytes == 2048 + 512 + 1024
    assert str(report).splitlines() == [
        "arena                dtype     reserved   in use  high water  holes",
        "masters              float32    2.0 KiB  2.0 KiB     2.0 KiB    0 B",
        "moved-out gradients  bfloat16   1.5 KiB  1.0 KiB     1.5 KiB    0 B",
        "all arenas                      3.5 KiB",
        "frozen parameters    outside             3.0 MiB",
    ]


def test_two_arenas_of_one_name_are_a_mistake() -> None:
    arenas = Arenas()
    arenas.reserve("masters", 256, torch.zeros)
    with pytest.raises(AssertionError, match="masters already"):
        arenas.growing("masters", torch.zeros)


def test_what_lies_in_host_memory_is_told_apart() -> None:
    arenas = Arenas()
    arenas.reserve("masters", 512, torch.zeros, tier="host")
    arenas.reserve("parameters", 256, lambda numel: torch.zeros(numel, dtype=torch.bfloat16))
    report = arenas.report()
    assert (report.bytes_in("device"), report.bytes_in("host"), report.reserved_bytes) == (512, 2048, 2560)
    assert str(report).splitlines() == [
        "arena               dtype     reserved  in use  high water  holes",
        "parameters          bfloat16     512 B     0 B         0 B    0 B",
        "all on the device                512 B",
        "masters             float32    2.0 KiB     0 B         0 B    0 B",
        "all in host memory             2.0 KiB",
    ]
