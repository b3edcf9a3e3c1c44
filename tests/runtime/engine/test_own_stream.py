"""A script that computes on a CUDA stream of its own trains as on the default one: the same bits, and sound saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.mesh.loopback import LoopbackWorld
from support.devices import on_devices
from support.inside_engine import units_of
from support.late_collectives import LateWorld
from support.models import TinyGPT
from support.slow_lanes import late_bus
from support.threaded_ranks import ThisThread, Trained, assert_same_bits, stream_of_its_own, train_in
from support.training import batches, config

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
AHEAD = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
PARAMS = {"offload_param": {"device": "cpu"}}
RINGS = {"activation_checkpointing": {"policy": "every_block", "cpu_checkpointing": True}}

#: Stage, keys of `zero_optimization`, accumulation steps, and the rest of the config.
CASES: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "stage 0": (0, {}, 2, {}),
    "stage 2": (2, {}, 2, {"bf16": True}),
    "stage 3, recomputed": (3, {}, 2, {"bf16": True, "activation_checkpointing": {"policy": "every_block"}}),
    "ahead, stage 2": (2, AHEAD, 1, {"bf16": True}),
    "params and optimizer": (3, {**OPTIMIZER, **PARAMS}, 2, {"bf16": True}),
    "params and ahead": (3, {**AHEAD, **PARAMS}, 1, {"bf16": True}),
    "rings": (2, {}, 2, {"bf16": True, **RINGS}),
    "rings, params and optimizer": (3, {**OPTIMIZER, **PARAMS}, 1, {"bf16": True, **RINGS}),
}


def model() -> nn.Module:
    return TinyGPT(width=40, layers=4)


def settings_of(case: str) -> dict[str, Any]:
    stage, zero, accumulation, options = CASES[case]
    settings = config(stage, micro=1, accumulation=accumulation, **options)
    settings["zero_optimization"] |= zero
    return settings


def evaluates(engine: Any, noted: list[Tensor]) -> None:
    """A forward without a backward, whose results the script reads on its stream."""
    with torch.no_grad():
        noted.append(engine(batches(99, samples=1)[0].to(engine.device)).clone())


def train(case: str, world: LoopbackWorld, device: torch.device, **buses: Any) -> list[Trained]:
    return train_in(world, settings_of(case), device=device, model=model, steps=3, between=evaluates, **buses)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
@pytest.mark.parametrize(
    ("case", "late"),
    [
        ("stage 2", True),
        ("stage 3, recomputed", False),
        ("ahead, stage 2", True),
        ("params and optimizer", True),
        ("rings", True),
        ("rings, params and optimizer", False),
    ],
)
def test_a_stream_of_the_scripts_own_changes_no_bit(case: str, late: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    expected = train(case, ThisThread(), device)
    with stream_of_its_own(device):
        if late:
            found = train(case, LateWorld(1, device=device), device, bus=late_bus, ring_bus=late_bus)
        else:
            found = train(case, ThisThread(), device)
    assert_same_bits(found, expected)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.5)
def test_an_engine_made_on_the_default_stream_trains_on_another() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    case = "params and ahead"
    expected = train(case, ThisThread(), device)
    stream = torch.cuda.Stream(device)
    before = torch.cuda.current_stream(device)

    def moves_over(engine: Any, noted: list[Tensor]) -> None:
        if torch.cuda.current_stream(device) != stream:
            stream.wait_stream(before)
            torch.cuda.set_stream(stream)
        evaluates(engine, noted)

    try:
        found = train_in(
            ThisThread(),
            settings_of(case),
            device=device,
            model=model,
            steps=4,
            between=moves_over,
            bus=late_bus,
            ring_bus=late_bus,
        )
    finally:
        torch.cuda.set_stream(before)
        before.wait_stream(stream)
    assert_same_bits(found, expected)


@pytest.mark.gpu_seconds(1.2)
@pytest.mark.parametrize(
    ("device", "case"),
    on_devices(
        ["stage 0", "stage 3, recomputed", "params and ahead", "rings, params and optimizer"],
        on_gpu=["stage 3, recomputed", "params and ahead"],
    ),
    indirect=["device"],
)
def test_a_save_that_is_written_behind_training_has_the_state_of_its_step(
    device: torch.device, case: str, tmp_path: Path
) -> None:
    settings = settings_of(case) | {"checkpoint": {"asynchronous": True}}
    masters: list[Tensor] = []

    def saves_after_two(engine: Any, noted: list[Tensor]) -> None:
        if engine.global_steps == 2:
            engine.save_checkpoint(str(tmp_path))
            masters.extend(_masters(engine))

    def loads(engine: Any, noted: list[Tensor]) -> None:
        engine.load_checkpoint(str(tmp_path))
        noted.extend(_masters(engine))

    late: dict[str, Any] = {"device": device, "model": model, "bus": late_bus, "ring_bus": late_bus}
    with stream_of_its_own(device):
        train_in(LateWorld(1, device=device), settings, steps=4, between=saves_after_two, **late)
        (loaded,) = train_in(LateWorld(1, device=device), settings, steps=0, between=loads, **late)
    assert masters
    assert all(torch.equal(found, value) for found, value in zip(loaded.noted, masters, strict=True))


def _masters(engine: Any) -> list[Tensor]:
    """Copies of what the rank owns, at the end of the last update."""
    for unit in units_of(engine):
        unit.settle()
    return [unit.whole_master().detach().cpu().clone() for unit in units_of(engine)]
