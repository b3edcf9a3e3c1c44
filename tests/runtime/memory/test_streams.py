"""Memory that another stream uses than the one it was allocated on: said where it is so, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.memory.streams import current_stream, on_stream, use_here

CPU = torch.device("cpu")


class Recording:
    """A tensor that is told of streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.told: list[object] = []

    def record_stream(self, stream: object) -> None:
        self.told.append(stream)


def test_the_cpu_has_no_streams() -> None:
    assert current_stream(CPU) is None
    with on_stream(None):
        use_here(torch.ones(2), None)


@pytest.mark.cuda
def test_an_allocator_is_told_of_a_stream_that_is_not_its_own() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = current_stream(device), torch.cuda.Stream()
    tensor = Recording(device)
    use_here(tensor, first)  # type: ignore[arg-type]
    assert tensor.told == []
    with on_stream(second):
        assert current_stream(device) == second
        use_here(tensor, first)  # type: ignore[arg-type]
    assert tensor.told == [second]
    assert current_stream(device) == first
