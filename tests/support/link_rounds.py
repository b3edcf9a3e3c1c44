"""Messages that every implementation of `PointToPoint` is held to; run on each of two ranks or more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsrun.runtime.mesh.point_to_point.links import Lane, PointToPoint

ACTIVATIONS, GRADIENTS = Lane.ACTIVATIONS, Lane.GRADIENTS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kinds(seed: int = 0) -> list[Tensor]:
    """Tensors of all kinds that cross a cut of a model."""
    whole = random(8, 6, seed=seed)
    return [
        whole,
        whole.t(),
        whole[::2, 1:5:3],
        whole.expand(3, 8, 6),
        random(0, 5),
        torch.tensor(3.5 + seed),
        whole > 0,
        torch.arange(7) + seed,
        torch.arange(5, dtype=torch.int32),
        torch.arange(5, dtype=torch.uint8),
        whole.bfloat16(),
        whole.half(),
        whole.double(),
        random(4, seed=seed).requires_grad_(),
    ]


def assert_equal(found: tuple[Tensor, ...], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.is_contiguous()
        assert not one.requires_grad
        assert torch.equal(one, other)


def every_kind(links: PointToPoint) -> None:
    """Tensors of all kinds arrive as they are, around the ring."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    coming = links.receive(source=before, lane=ACTIVATIONS, label="kinds")
    links.send(kinds(links.rank), to=after, lane=ACTIVATIONS, header=b"kinds", label="kinds").wait()
    message = coming.wait()
    assert message.header == b"kinds"
    assert_equal(message.tensors, kinds(before))


def headers_and_no_tensors(links: PointToPoint) -> None:
    """Headers of any length arrive, with tensors and without."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    lengths = [0, 1, 150, 215, 216, 217, 10_000]
    for length in lengths:
        for tensors in ([], [random(3)]):
            links.send(tensors, to=after, lane=GRADIENTS, header=b"h" * length)
    for length in lengths:
        for tensors in ([], [random(3)]):
            message = links.receive(source=before, lane=GRADIENTS).wait()
            assert message.header == b"h" * length
            assert_equal(message.tensors, tensors)


def many_in_flight(links: PointToPoint) -> None:
    """Both lanes in both directions at once, more messages than a page has, of changing shapes; order is kept."""
    count = 300
    others = [rank for rank in range(links.size) if rank != links.rank]
    asked = {
        (rank, lane, number): links.receive(source=rank, lane=lane, label="early")
        for rank in others
        for lane in Lane
        for number in range(3)
    }
    for number in range(count):
        for rank in others:
            for lane in Lane:
                shape = (1 + number % 3, 4) if lane is ACTIVATIONS else (5,)
                links.send([torch.full(shape, number + links.rank / 8)], to=rank, lane=lane, header=b"%d" % number)
    for rank in others:
        for lane in (GRADIENTS, ACTIVATIONS):
            for number in range(count):
                coming = asked.get((rank, lane, number)) or links.receive(source=rank, lane=lane)
                message = coming.wait()
                assert message.header == b"%d" % number
                shape = (1 + number % 3, 4) if lane is ACTIVATIONS else (5,)
                assert_equal(message.tensors, [torch.full(shape, number + rank / 8)])


def waited_for_out_of_order(links: PointToPoint) -> None:
    """Messages belong to the calls in the order in which these asked, in whatever order they are waited for."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    asked = [links.receive(source=before, lane=ACTIVATIONS, label=f"{number}") for number in range(4)]
    for number in range(4):
        links.send([torch.tensor(number)], to=after, lane=ACTIVATIONS)
    for number in (2, 0, 3, 1):
        assert int(asked[number].wait().tensors[0]) == number


def nothing_is_shared(links: PointToPoint) -> None:
    """What the sender writes after its wait, and what the receiver writes, neither sees the other's."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    mine = torch.full((1000,), float(links.rank))
    links.send([mine, mine], to=after, lane=ACTIVATIONS).wait()
    mine.fill_(-1)
    first, second = links.receive(source=before, lane=ACTIVATIONS).wait().tensors
    version = second._version
    assert first.eq(before).all()
    first.fill_(7)
    assert second.eq(before).all()
    assert second._version == version, "writing into one tensor of a message is not the other's history"
    assert mine.eq(-1).all()


def kept_messages_stay(links: PointToPoint) -> None:
    """Tensors that the receiver keeps, and views of them alone, keep their values while further messages come."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    kept: list[Tensor] = []
    for number in range(40):
        links.send([torch.full((500,), float(number)), random(3)], to=after, lane=ACTIVATIONS)
        tensor = links.receive(source=before, lane=ACTIVATIONS).wait().tensors[0]
        if number % 2:
            kept.append(tensor[100:200].view(10, 10))
    for number, tensor in enumerate(kept):
        assert tensor.eq(2 * number + 1).all()


def in_inference_mode_and_out(links: PointToPoint) -> None:
    """Memory that inference has used serves training, and the other way round."""
    after, before = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            links.send([torch.full((777,), float(links.rank))], to=after, lane=GRADIENTS)
            found = links.receive(source=before, lane=GRADIENTS).wait().tensors[0]
            found.mul_(2)
        assert found.eq(2 * before).all()
        assert found.is_inference() == inference
        del found


ROUNDS: list[Callable[[PointToPoint], None]] = [
    every_kind,
    headers_and_no_tensors,
    many_in_flight,
    waited_for_out_of_order,
    nothing_is_shared,
    kept_messages_stay,
    in_inference_mode_and_out,
]


def run_all(links: PointToPoint) -> dict[str, int]:
    """Runs every round, twice; returns the calls and bytes that were counted."""
    for _ in range(2):
        for body in ROUNDS:
            body(links)
    counted = links.traffic
    assert counted.calls["send"] == counted.calls["receive"]
    return {**counted.calls, "send_bytes": counted.bytes["send"], "receive_bytes": counted.bytes["receive"]}
