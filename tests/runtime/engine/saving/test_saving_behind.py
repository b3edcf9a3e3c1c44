"""Saves that copy behind training, and those that read a drive: the moment's values, whatever training does next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.engine.saving.persist import _state
from dsrun.runtime.protocols import StateEntry
from support.entries import empty_like
from support.inside_engine import components_of, deferred_update_of, saver_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, make_engine, train

MICRO = 2
BEHIND = {"when_copied": "behind"}


def settings(stage: int, *, offload: dict[str, Any] | None = None, params: Any = None, **more: Any) -> dict[str, Any]:
    made = config(stage, micro=MICRO, **{"checkpoint": BEHIND, **more})
    if offload is not None:
        made["zero_optimization"]["offload_optimizer"] = offload
    if params is not None:
        made["zero_optimization"]["offload_param"] = params
    return made


def half_frozen() -> nn.Module:
    torch.manual_seed(3)
    model = TinyGPT(width=32, layers=2)
    model.blocks[0].requires_grad_(False)
    return model


def entries_of(engine: Any, folder: Path) -> list[StateEntry]:
    """What a save would take of this rank now."""
    checkpoints = components_of(engine).checkpoints
    moment = components_of(engine).moment.present()
    wanted = _state(checkpoints._run, moment, {}, frozen=True, apart=False, stores=True)
    return [entry for entry in wanted.entries if entry.role != "rng"]


def copies_of(entries: list[StateEntry]) -> list[Tensor]:
    return [entry.tensor.clone() for entry in entries]


def saved(target: Path, entries: list[StateEntry]) -> list[Tensor]:
    """The same pieces as a checkpoint has them, whose every byte is checked."""
    index = read_index(target)
    assert list(verify(target, index)) == []
    fresh = [empty_like(entry) for entry in entries]
    read(index, target, fresh)
    return [entry.tensor for entry in fresh]


def assert_same(entries: list[StateEntry], moment: list[Tensor]) -> None:
    assert all(torch.equal(entry.tensor, value) for entry, value in zip(entries, moment, strict=False))


def assert_nothing_of_drives_is_staged(engine: Any, entries: list[StateEntry]) -> None:
    """Of masters, states and frozen slices only counts of steps are copied to memory."""
    sources = saver_of(engine)._last.save.sources
    on_drive = [e for e in entries if components_of(engine).checkpoints._run.on_drive(e.tensor) is not None]
    assert {entry.role for entry in on_drive} == {"param", "exp_avg", "exp_avg_sq"}
    read_there = sum(segment.nbytes for segment in sources.segments if segment.descriptor is not None)
    assert read_there == sum(entry.tensor.nbytes for entry in on_drive)
    floating = [copy.values for copy in sources.copies if copy.values.is_floating_point()]
    assert {values.numel() for values in floating} <= {1}, [values.shape for values in floating]
    assert sources.image_bytes < 4096 * 20 < read_there, "the header, random numbers and counts"


def forward_and_backward(engine: Any, step: int) -> None:
    inputs, targets = batches(step, samples=MICRO * engine.world_size)
    first = engine.global_rank * MICRO
    engine.backward(loss_of(engine(inputs[first : first + MICRO]), targets[first : first + MICRO]))


@contextmanager
def held_up(fence: Any, before_going_on: Callable[[], None]) -> Any:
    """Nothing is copied until somebody waits at the fence; then `before_going_on` is called, in another thread."""
    go, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not fence.waits and not over.wait(0.005):
                pass
            before_going_on()
        except BaseException as error:
            failures.append(error)
        finally:
            go.set()

    def pace(unit: int) -> None:
        assert go.wait(60), "somebody waits at the fence"

    fence.pace, fence.waits = pace, 0
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        fence.pace = lambda unit: None
    assert not failures, failures


def _save_and_train(folder: str, cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        model = half_frozen() if case.pop("frozen", False) else None
        engine = make_engine(settings(**case), model=model)
        samples = MICRO * engine.world_size
        train(engine, range(2), samples=samples)
        fence, target = saver_of(engine).fence, Path(folder) / name
        for save in range(2):  # the second one uses the memory of the first
            if deferred_update_of(engine) is not None:
                deferred_update_of(engine).settle()
            entries = entries_of(engine, target)
            moment = copies_of(entries)
            # A drive shows nothing while it is stepped.
            shown = [] if case.get("offload", {}).get("device") == "nvme" else entries
            with held_up(fence, partial(assert_same, shown, moment)):
                engine.save_checkpoint(folder, tag=f"{name}-{save}")
                assert fence.is_closed, name
                if not shown:
                    assert_nothing_of_drives_is_staged(engine, entries)
                forward_and_backward(engine, 10 + save)
                assert fence.waits == 0, "forward and backward wait for no copy"
                engine.step()
                if deferred_update_of(engine) is not None:
                    deferred_update_of(engine).settle()
            assert fence.waits
            train(engine, range(20, 22), samples=samples)
            engine.wait_for_checkpoint()
            assert not fence.is_closed
            found = saved(Path(folder) / f"{name}-{save}", entries)
            for entry, value, expected in zip(entries, found, moment, strict=True):
                assert torch.equal(value, expected), (name, save, entry.name, entry.role)
            if deferred_update_of(engine) is not None:
                deferred_update_of(engine).settle()
            now = zip(entries_of(engine, target), moment, strict=True)
            assert any(not torch.equal(entry.tensor, value) for entry, value in now), "training went on"
        engine.destroy()


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    drive = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "stage0": {"stage": 0},
        "stage1-bf16": {"stage": 1, "bf16": True},
        "stage2-lamb": {"stage": 2, "optimizer": "Lamb"},
        "stage3-frozen": {"stage": 3, "frozen": True},
        "host": {"stage": 2, "bf16": True, "offload": {"device": "cpu"}},
        "host3": {"stage": 3, "offload": {"device": "cpu"}, "params": {"device": "cpu"}},
        "drive": {"stage": 3, "bf16": True, "offload": drive, "params": {**drive, "max_in_cpu": 0}, "frozen": True},
        "drive-at-once": {"stage": 1, "offload": drive, "checkpoint": {}},
    }


@pytest.mark.parametrize(
    ("size", "left_out"),
    [
        pytest.param(1, {"stage1-bf16", "stage3-frozen", "host3", "drive"}, id="1"),
        pytest.param(2, {"stage0", "stage2-lamb", "host", "drive-at-once"}, id="2"),
        pytest.param(
            1,
            {"stage1-bf16", "stage3-frozen", "host3"},
            id="1-all",
            marks=pytest.mark.soak("one of 1 and 2 ranks each"),
        ),
        pytest.param(2, set[str](), id="2-all", marks=pytest.mark.soak("one of 1 and 2 ranks each")),
    ],
)
def test_a_checkpoint_holds_the_moment_of_its_save_though_its_copy_comes_later(
    tmp_path: Path, size: int, left_out: set[str]
) -> None:
    (tmp_path / "drive").mkdir()
    chosen = {name: case for name, case in cases(tmp_path / "drive").items() if name not in left_out}
    run_ranks(size, _save_and_train, str(tmp_path), chosen, timeout_s=300)


def _script_writes(folder: str) -> str:
    engine = make_engine(settings(1))
    train(engine, range(2), samples=MICRO * engine.world_size)
    fence, go = saver_of(engine).fence, threading.Event()
    fence.pace = lambda unit: _wait(go)
    engine.save_checkpoint(folder, tag="torn")
    with torch.no_grad():
        engine.module.head.weight.mul_(2.0)
    go.set()
    with pytest.raises(CheckpointError) as caught:
        engine.wait_for_checkpoint()
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(folder, tag="torn")
    engine.save_checkpoint(folder, tag="whole")
    with dsrun.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0), torch.no_grad():
        engine.module.head.weight.mul_(2.0)
    engine.wait_for_checkpoint()
    engine.destroy()
    return str(caught.value)


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def _others_wait(folder: str) -> list[str]:
    """Whoever changes state through this library comes behind the copy."""
    engine = make_engine(settings(2, bf16=True))
    train(engine, range(2), samples=MICRO * engine.world_size)
    weight, fence = engine.module.head.weight, saver_of(engine).fence
    done: list[str] = []
    zeros = torch.zeros_like(dsrun.utils.safe_get_full_fp32_param(weight))
    changes: dict[str, Callable[[], object]] = {
        "master": lambda: dsrun.utils.safe_set_full_fp32_param(weight, zeros),
        "state": lambda: dsrun.utils.safe_set_full_optimizer_state(weight, zeros, "exp_avg"),
        "weights": lambda: engine.load_module_state_dict(engine.module_state_dict(all_ranks=True)),
        "away": lambda: engine.offload_states(),
    }
    for name, change in changes.items():
        entries = entries_of(engine, Path(folder))
        moment = copies_of(entries)
        with held_up(fence, partial(assert_same, entries, moment)):
            engine.save_checkpoint(folder, tag=name)
            change()
            engine.reload_states()
        assert fence.waits, name
        engine.wait_for_checkpoint()
        found = saved(Path(folder) / name, entries)
        assert all(torch.equal(value, expected) for value, expected in zip(found, moment, strict=True)), name
        done.append(name)
    entries = entries_of(engine, Path(folder))
    moment = copies_of(entries)
    engine.save_checkpoint(folder, tag="end")
    engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(saved(Path(folder) / "end", entries), moment, strict=True))
    return done


def test_a_parameter_that_the_script_changes_meanwhile_fails_the_save_by_name(tmp_path: Path) -> None:
    text = run_ranks(1, _script_writes, str(tmp_path))[0]
    assert "torn: could not be saved, nothing was published: rank 0: `head.weight` changed while being copied" in text
    assert "GatheredParameters" in text


def test_whoever_sets_or_moves_state_waits_for_its_copy(tmp_path: Path) -> None:
    assert run_ranks(2, _others_wait, str(tmp_path))[0] == ["master", "state", "weights", "away"]
