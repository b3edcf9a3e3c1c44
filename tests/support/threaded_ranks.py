"""Whole engines in the threads of a `LoopbackWorld`: what each rank computed, to be compared bit for bit.

The composition root is shown a mesh and buses other than the job's, by the names that it calls; all else is its own.
"""

from __future__ import annotations

import copy
import gc
import importlib
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.contract.environment import RankInfo
from dsrun.mesh_spec import MeshSpec
from dsrun.runtime.activation.keep.rings import Rings
from dsrun.runtime.memory.bus import Bus
from dsrun.runtime.mesh.host_memory.noticeboard import LocalNoticeboard
from dsrun.runtime.mesh.join.groups import ProcessGroupMesh
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.point_to_point.alone import AlonePointToPoint
from dsrun.runtime.mesh.point_to_point.loopback import LoopbackPointToPoint
from support.inside_engine import step_of, tiers_of
from support.models import TinyGPT, loss_of
from support.training import batches

#: Makes the bus of a device.
MakeBus = Callable[[torch.device], Bus]

_JOB = "dsrun.runtime.engine.compose.job"
_MESH = "dsrun.runtime.engine.compose.mesh"
_SAVING = "dsrun.runtime.engine.compose.saving"
_TIERS = "dsrun.runtime.engine.host.tiers"
_ACTIVATE = "dsrun.runtime.activation.activate"


@dataclass(slots=True)
class Trained:
    """What one rank has at the end.

    Attributes:
        losses: loss of each micro batch.
        norms: norm of the gradients of each step.
        masters: master parameters that the rank owns, one tensor for each unit.
        params: each unit's parameters, as this rank holds them.
        noted: further tensors that the test wants to compare.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[float] = field(default_factory=list[float])
    masters: list[Tensor] = field(default_factory=list[Tensor])
    params: list[Tensor] = field(default_factory=list[Tensor])
    noted: list[Tensor] = field(default_factory=list[Tensor])


#: Called with the engine and what is noted of it, after each step and once before the first one.
Between = Callable[[Any, list[Tensor]], None]


class ThisThread(LoopbackWorld):
    """One rank: the calling thread, on its stream."""

    def __init__(self) -> None:
        super().__init__(1)

    def run(self, body: Callable[[LoopbackCollectives], Any]) -> list[Any]:
        """See `LoopbackWorld`."""
        return [body(LoopbackCollectives(self, 0))]


def assert_same_bits(found: list[Trained], expected: list[Trained]) -> None:
    """Every number of every rank is the other's, and finite."""
    assert len(found) == len(expected)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.norms == other.norms, f"rank {rank}: gradient norms"
        for name in ("losses", "masters", "params", "noted"):
            pairs = zip(getattr(one, name), getattr(other, name), strict=True)
            for number, (value, wanted) in enumerate(pairs):
                assert bool(torch.isfinite(value).all()), f"rank {rank}: {name} {number} is not finite"
                assert torch.equal(value, wanted), f"rank {rank}: {name} {number}"


def train_in(
    world: LoopbackWorld,
    settings: dict[str, Any],
    *,
    device: torch.device,
    model: Callable[[], nn.Module] = TinyGPT,
    steps: int = 3,
    bus: MakeBus | None = None,
    ring_bus: MakeBus | None = None,
    between: Between = lambda engine, noted: None,
) -> list[Trained]:
    """Trains an engine a rank, and returns what each rank has at the end.

    Args:
        world: the ranks.
        settings: the config.
        device: device on which all ranks compute.
        model: function that makes the model.
        steps: optimizer steps.
        bus: function that makes the engine's bus for a device; None for the device's own bus.
        ring_bus: function that makes the bus of each ring of activations for a device; None for the device's own bus.
        between: callback that gets the engine and the list of noted tensors, once before the first step and after each
            step; see `Between`.
    """
    torch.manual_seed(7)
    first = model()
    models = [first, *(copy.deepcopy(first) for _ in range(1, world.size))]
    here = _Here(device)

    def body(collectives: LoopbackCollectives) -> Trained:
        torch.set_num_threads(1)
        here.rank.collectives = collectives
        return _train(models[collectives.rank].to(device), settings, steps, between)

    with pytest.MonkeyPatch.context() as patch, _collector_off():
        here.show(patch)
        if bus is not None:
            patch.setattr(importlib.import_module(_TIERS), "bus_for", bus)
        if ring_bus is not None:
            patch.setattr(importlib.import_module(_ACTIVATE), "Rings", partial(Rings, bus_of=ring_bus))
        return world.run(body)


@contextmanager
def ranks_of_threads(
    device: torch.device,
) -> Generator[Callable[[LoopbackCollectives, Callable[[LoopbackCollectives], Any]], Any]]:
    """Yields what runs a body that makes engines as the rank of some collectives, in the thread that calls it."""
    here = _Here(device)

    def run(collectives: LoopbackCollectives, body: Callable[[LoopbackCollectives], Any]) -> Any:
        torch.set_num_threads(1)
        here.rank.collectives = collectives
        return body(collectives)

    with pytest.MonkeyPatch.context() as patch, _collector_off():
        here.show(patch)
        yield run


@contextmanager
def _collector_off() -> Generator[None]:
    """Has Python collect no cycles while ranks run in threads.

    Ranks in threads share torch's generator. Its `get_state` holds a lock while it makes a Python object: a collection
    that begins there, and a finaliser that lets go of the GIL, leave another thread waiting for the lock with the GIL
    in its hands. Ranks in processes have a generator each.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Here:
    """Tells the composition root which rank its thread is."""

    def __init__(self, device: torch.device) -> None:
        self.rank = threading.local()
        self._device = device
        self._board = LocalNoticeboard()

    def show(self, patch: pytest.MonkeyPatch) -> None:
        """Has the composition root ask here."""
        patch.setattr(importlib.import_module(_JOB), "join_job", lambda **_: self._info())
        root = importlib.import_module(_MESH)
        patch.setattr(root, "present_backend", lambda: "gloo")
        patch.setattr(root, "choose_device", lambda backend, info: self._device)
        patch.setattr(root, "make_mesh", self._mesh)
        patch.setattr(importlib.import_module(_SAVING), "noticeboard", lambda: self._board)

    def _info(self) -> RankInfo:
        axis: LoopbackCollectives = self.rank.collectives
        return RankInfo(rank=axis.rank, world_size=axis.size, local_rank=axis.rank, local_world_size=axis.size)

    def _mesh(
        self, spec: MeshSpec, info: RankInfo, *, device: torch.device, observer: Any, stage_observer: Any
    ) -> ProcessGroupMesh:
        del observer, stage_observer
        world: LoopbackCollectives = self.rank.collectives
        views = {view: world.among(spec.peers(world.rank, view)) for view in spec.views()}
        ranks = spec.peers(world.rank, spec.role_axes("pipe"))
        peers = world.among(ranks)
        links = LoopbackPointToPoint(peers, ranks) if peers.size > 1 else AlonePointToPoint()
        return ProcessGroupMesh(spec, info, device, "gloo", views, world.where, world.among, links=links)


def _train(module: nn.Module, settings: dict[str, Any], steps: int, between: Between) -> Trained:
    import dsrun

    engine: Any = dsrun.initialize(model=module, config=settings)[0]
    trained = Trained()
    try:
        between(engine, trained.noted)
        _take_steps(engine, steps, trained, between)
        step = step_of(engine)
        if step.away is not None:
            step.away.settle()
        tiers_of(engine).bus.finish()
        for unit in step.units:
            unit.settle()
            trained.masters.append(unit.whole_master().detach().cpu().clone())
            trained.params.append(unit.shard.detach().cpu().clone())
            if not step.plan.shard_parameters:
                trained.params.append(unit.flat_param.detach().cpu().clone())
    finally:
        engine.destroy()
    trained.losses = [loss.cpu() for loss in trained.losses]
    trained.noted = [value.detach().cpu() for value in trained.noted]
    return trained


def _take_steps(engine: Any, steps: int, trained: Trained, between: Between) -> None:
    rank, size, micro = engine.global_rank, engine.world_size, engine.train_micro_batch_size_per_gpu()
    accumulation = engine.gradient_accumulation_steps()
    for step in range(steps):
        inputs, targets = batches(step, samples=micro * accumulation * size)
        for micro_step in range(accumulation):
            first = (micro_step * size + rank) * micro
            mine = inputs[first : first + micro].to(engine.device), targets[first : first + micro].to(engine.device)
            loss = loss_of(engine(mine[0]), mine[1])
            engine.backward(loss)
            engine.step()
            trained.losses.append(loss.detach())
        trained.norms.append(engine.get_global_grad_norm())
        between(engine, trained.noted)


@contextmanager
def stream_of_its_own(device: torch.device) -> Generator[None]:
    """What is enqueued inside runs on another stream than the one outside, and in between; a CPU has one for all."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
