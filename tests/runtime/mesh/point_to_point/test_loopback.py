"""Messages among threads: a rank that fails releases the others, and one that stays away is named."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.point_to_point.links import Lane
from dsrun.runtime.mesh.point_to_point.loopback import LoopbackPointToPoint


def test_a_rank_that_fails_releases_those_that_wait_for_its_messages() -> None:
    def body(axis: LoopbackCollectives) -> None:
        links = LoopbackPointToPoint(axis)
        if axis.rank == 0:
            links.receive(source=1, lane=Lane.ACTIVATIONS).wait()
        else:
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        LoopbackWorld(2).run(body)


def test_a_rank_that_stays_away_is_named() -> None:
    def body(axis: LoopbackCollectives) -> None:
        links = LoopbackPointToPoint(axis, ranks=[4, 6])
        if axis.rank == 0:
            axis.where.at(2, 1)
            links.receive(source=1, lane=Lane.GRADIENTS, label="gradients of micro batch 3").wait()

    with pytest.raises(ModelError) as caught:
        LoopbackWorld(2, timeout_s=0.05).run(body)
    assert str(caught.value).startswith("rank 4 (0 of 2 along its axis) waited 0.05")
    assert str(caught.value).endswith(
        " s in receive of gradients of micro batch 3 from rank 6 (1 along the axis), on the lane of gradients "
        "at step 2, micro step 1"
    )


def test_ranks_of_a_part_of_the_world_have_messages_of_their_own() -> None:
    def body(axis: LoopbackCollectives) -> float:
        ranks = (axis.rank % 2, axis.rank % 2 + 2)
        links = LoopbackPointToPoint(axis.among(ranks), ranks)
        links.send([torch.tensor(float(axis.rank))], to=1 - links.rank, lane=Lane.ACTIVATIONS)
        return float(links.receive(source=1 - links.rank, lane=Lane.ACTIVATIONS).wait().tensors[0])

    assert LoopbackWorld(4).run(body) == [2.0, 3.0, 0.0, 1.0]
