"""Which ring a section asks for; folders that cannot be used are found before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import OffloadError
from dsrun.runtime.activation.keep.disk_ring import DiskRing
from dsrun.runtime.activation.keep.host_ring import HostRing
from dsrun.runtime.activation.keep.rings import Rings

CPU = torch.device("cpu")


def rings(*paths: Path | str) -> Rings:
    section = ActivationCheckpointing.model_validate({"cpu_checkpointing": True, "nvme_path": [str(p) for p in paths]})
    return Rings(section, io=None, rank=3)


def inputs() -> list[Tensor]:
    return [torch.full((ALIGNED,), float(i)) for i in range(7)]


ALIGNED = 1024  # elements of fp32: a block of a disk


def test_without_a_path_the_ring_is_in_host_memory() -> None:
    assert isinstance(rings().ring_of(CPU), HostRing)
    assert rings().counts().written_bytes == 0


def test_a_folder_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=f"{tmp_path}/away: no file can be made there for activations of rank 3"):
        rings(tmp_path, tmp_path / "away")


def test_rings_of_one_section_are_counted_together_and_leave_nothing_behind(tmp_path: Path) -> None:
    there = rings(tmp_path)
    kept = [there.ring_of(CPU), there.ring_of(CPU)]
    for ring in kept:
        assert isinstance(ring, DiskRing)
        tickets = [ring.put(tensor) for tensor in inputs()]
        for tensor in reversed(inputs()):
            assert torch.equal(tickets.pop().take(), tensor)
    assert there.counts().written_bytes == 2 * 5 * 4 * ALIGNED  # the last two of seven never leave
    assert list(tmp_path.iterdir()) == []
