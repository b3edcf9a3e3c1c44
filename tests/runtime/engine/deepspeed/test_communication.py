"""What `deepspeed.comm` has beyond torch.distributed works before an engine is made, on one rank and on several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import dsrun
from dsrun import comm
from support.ranks import run_ranks


def _talk() -> list[Any]:
    before = dsrun.comm.is_initialized()
    backend = dsrun.comm.TorchBackend("gloo")
    again = dsrun.comm.TorchBackend("gloo", name="again")
    tensor = torch.full((2,), float(dist.get_rank() + 1))
    dsrun.comm.inference_all_reduce(tensor)
    backend.all_reduce(tensor, prof=True)
    return [
        before,
        backend.is_initialized(),
        again.name,
        backend.get_world_size(),
        tensor.tolist(),
        comm.get_all_ranks_from_group(),
        comm.get_all_ranks_from_group(comm.get_world_group()),
        _in_deepspeeds_words(),
        _numbers(),
        _messages(),
        _places(),
    ]


def _in_deepspeeds_words() -> dict[str, Any]:
    """Calls each collective with DeepSpeed's names and words."""
    rank = dist.get_rank()
    words: dict[str, Any] = {"prof": True, "log_name": "mine", "debug": "here"}
    mine = torch.tensor([float(rank), 5.0])
    whole, part = torch.zeros(4), torch.zeros(2)
    seen: dict[str, Any] = {}
    comm.all_gather_into_tensor(output_tensor=whole, tensor=mine, **words)
    seen["all_gather_into_tensor"] = whole.tolist()
    comm.allgather_fn(whole.zero_(), input_tensor=mine)
    seen["allgather_fn"] = whole.tolist()
    comm.reduce_scatter_tensor(output_tensor=part, tensor=torch.arange(4.0), group=None, **words)
    seen["reduce_scatter_tensor"] = part.tolist()
    comm.reduce_scatter_fn(part, torch.arange(4.0), op=comm.ReduceOp.MAX)
    seen["reduce_scatter_fn"] = part.tolist()
    comm.all_to_all_single(output=part, tensor=mine, **words)
    seen["all_to_all_single"] = part.tolist()
    work = comm.all_reduce(tensor=mine, op=comm.ReduceOp.MAX, async_op=True, **words)
    work.wait()
    comm.broadcast(tensor=mine, src=1, **words)
    seen["all_reduce"] = mine.tolist()
    tensors = [torch.ones(2), torch.ones(3)]
    comm.all_reduce_coalesced(tensors, **words)
    waiting = comm.all_reduce_coalesced(tensors=tensors, async_op=True)
    waiting.wait()
    seen["all_reduce_coalesced"] = [tensor.tolist() for tensor in tensors] + [waiting.is_completed()]
    gathered = [torch.zeros(2), torch.zeros(4)]
    comm.all_gather_coalesced(gathered, [torch.full((1,), float(rank)), torch.full((2,), float(rank))])
    seen["all_gather_coalesced"] = [tensor.tolist() for tensor in gathered]
    alone = [dist.new_group([place]) for place in range(2)][rank]
    of_group, waiting = [torch.zeros(1)], [torch.zeros(1)]
    comm.all_gather_coalesced(of_group, [mine[:1] + rank + 2], group=alone)
    comm.all_gather_coalesced(waiting, [mine[:1] + rank + 3], group=alone, async_op=True).wait()
    seen["all_gather_coalesced of a group"] = [float(tensor) for tensor in (*of_group, *waiting)]
    found: list[Any] = [None, None]
    comm.all_gather_object(object_list=found, obj=rank, **words)
    seen["all_gather_object"] = found
    comm.barrier(**words)
    comm.monitored_barrier(wait_all_ranks=True, **words)
    return seen


def _numbers() -> list[list[float]]:
    """Gathers tensors of no dimension, which Gloo itself does not take everywhere."""
    rank = float(dist.get_rank())
    listed = [torch.zeros(()), torch.zeros(())]
    comm.all_gather(listed, torch.tensor(rank))
    whole, part = torch.zeros(2), torch.zeros(())
    comm.all_gather_into_tensor(whole, torch.tensor(rank))
    comm.reduce_scatter_tensor(part, torch.tensor([rank, rank + 1]))
    return [[float(number) for number in listed], whole.tolist(), [float(part)]]


def _messages() -> list[float]:
    """Sends to the other rank, one by one and as a batch of either's functions."""
    rank = dist.get_rank()
    got = [torch.zeros(1) for _ in range(3)]
    mine = torch.tensor([float(rank)])
    works = [comm.isend(mine, 1 - rank, prof=False), comm.irecv(got[0], src=1 - rank, log_name="mine")]
    for work in works:
        work.wait()
    for functions, target in (((comm.isend, comm.irecv), got[1]), ((dist.isend, dist.irecv), got[2])):
        messages = [comm.P2POp(functions[0], mine, 1 - rank), comm.P2POp(functions[1], tensor=target, peer=1 - rank)]
        assert all(isinstance(message, dist.P2POp) for message in messages)
        for work in comm.batch_isend_irecv(messages, prof=True):
            work.wait()
    return [float(tensor) for tensor in got]


def _places() -> list[Any]:
    mesh = comm.initialize_mesh_device((2, 1), ("data", "model"))
    return [
        comm.get_global_rank(group_rank=1),
        comm.get_global_rank(dist.group.WORLD, 0),
        [comm.get_local_rank_from_launcher(), comm.get_world_rank_from_launcher(), comm.get_world_size_from_launcher()],
        [mesh.size(0), mesh.size(1), dist.get_world_size(mesh.get_group("model"))],
        [comm.has_all_gather_into_tensor(), comm.has_reduce_scatter_tensor(), comm.has_all_reduce_coalesced()],
    ]


def test_ranks_join_by_it_and_collectives_take_deepspeeds_words() -> None:
    for rank, said in enumerate(run_ranks(2, _talk)):
        assert said[:7] == [False, True, "again", 2, [6.0, 6.0], [0, 1], [0, 1]]
        assert said[7] == {
            "all_gather_into_tensor": [0.0, 5.0, 1.0, 5.0],
            "allgather_fn": [0.0, 5.0, 1.0, 5.0],
            "reduce_scatter_tensor": [4.0, 6.0] if rank else [0.0, 2.0],
            "reduce_scatter_fn": [2.0, 3.0] if rank else [0.0, 1.0],
            "all_to_all_single": [5.0, 5.0] if rank else [0.0, 1.0],
            "all_reduce": [1.0, 5.0],
            "all_reduce_coalesced": [[4.0, 4.0], [4.0, 4.0, 4.0], True],
            "all_gather_coalesced": [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]],
            "all_gather_coalesced of a group": [3.0 + rank, 4.0 + rank],
            "all_gather_object": [0, 1],
        }
        assert said[8] == [[0.0, 1.0], [0.0, 1.0], [3.0 if rank else 1.0]]
        assert said[9] == [float(1 - rank)] * 3
        assert said[10] == [1, 0, [rank, rank, 2], [2, 1, 1], [True, True, True]]


def test_all_other_names_are_torchs_own() -> None:
    for name in ("get_rank", "get_world_size", "is_initialized", "new_group", "ReduceOp", "destroy_process_group"):
        assert getattr(comm, name) is getattr(dist, name)
