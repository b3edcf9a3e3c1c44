"""With slices of parameters on a disk a model trains as it does without: same bits, bytes counted, memory bounded."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.direct_io.settings import round_up
from dsrun.errors import ConfigError, OffloadError
from support.disks import FailingDisk, failure
from support.inside_engine import deferred_update_of, predicted_bytes, predicted_host_bytes, store_of, units_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train


def away(path: str, *, optimizer: str = "nvme", most: int = 0, keys: dict[str, Any] | None = None, **more: Any) -> Any:
    """A config with parameters on a disk."""
    settings = config(3, **more)
    zero = settings["zero_optimization"]
    zero["offload_param"] = {"device": "nvme", "nvme_path": path, "max_in_cpu": most, **(keys or {})}
    if optimizer != "none":
        zero["offload_optimizer"] = {"device": optimizer, "nvme_path": path}
    return settings


def tier_of(engine: Any) -> Any:
    return next(unit.tier for unit in units_of(engine) if unit.tier is not None)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def _compare(path: str, case: dict[str, Any], cases: list[dict[str, Any]], steps: int) -> None:
    plain = make_engine(config(1, **case))
    samples = case["micro"] * case.get("accumulation", 1) * plain.world_size
    losses = train(plain, range(steps), samples=samples)
    expected = full_parameters(plain)
    for more in cases:
        engine = make_engine(away(path, **more, **case))
        store_of(engine).poison = True
        assert train(engine, range(steps), samples=samples) == losses, more
        assert_same(full_parameters(engine), expected)
        engine.destroy()
    assert os.listdir(path) == []


def test_one_rank_has_the_bits_of_training_without(tmp_path: Path) -> None:
    cases = [{"optimizer": where} for where in ("none", "cpu", "nvme")]
    cases += [{"optimizer": "cpu", "most": 60_000}, {"optimizer": "nvme", "keys": {"buffer_count": 1}}]
    _compare(str(tmp_path), {"micro": 2, "bf16": True}, cases, 3)


def test_one_rank_that_adds_up_or_trains_in_fp32_has_them_too(tmp_path: Path) -> None:
    _compare(str(tmp_path), {"micro": 1, "accumulation": 2, "bf16": True}, [{"optimizer": "cpu"}, {}], 3)
    _compare(str(tmp_path), {"micro": 2}, [{}], 3)


def test_two_ranks_have_them_too(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"optimizer": "none"}, {"optimizer": "nvme", "most": 30_000}]
    run_ranks(2, _compare, str(tmp_path), {"micro": 2, "bf16": True}, cases, 3)


def test_fp32_masters_that_are_the_parameters_are_refused_beside_an_optimizer_in_host_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='is "nvme" in fp32 training with the optimizer in host memory'):
        make_engine(away(str(tmp_path), optimizer="cpu", micro=2))


def test_a_step_writes_each_slice_once_and_reads_it_for_each_gather(tmp_path: Path) -> None:
    engine = make_engine(away(str(tmp_path), micro=2, bf16=True))
    whole = sum(round_up(2 * unit.layout.shard_numel) for unit in units_of(engine))
    (at_first,) = tier_of(engine).counts()
    assert at_first.written_bytes == whole
    train(engine, range(2), samples=2)
    deferred_update_of(engine).settle()
    (before,) = tier_of(engine).counts()
    gathered = engine.counters().collectives.calls["all_gather"]
    train(engine, range(2, 4), samples=2)
    deferred_update_of(engine).settle()
    (after,) = tier_of(engine).counts()
    moved = after.since(before)
    assert moved.written_bytes == 2 * whole
    assert 0 < moved.read_bytes <= 2 * 2 * whole  # at most forward and backward of each step
    assert engine.counters().collectives.calls["all_gather"] > gathered


def test_what_may_stay_in_memory_is_never_read_from_the_disk(tmp_path: Path) -> None:
    engine = make_engine(away(str(tmp_path), most=1 << 30, micro=2, bf16=True))
    train(engine, range(2), samples=2)
    assert tier_of(engine).counts() == []
    assert not tier_of(engine).has_files


def test_memory_is_predicted_to_the_byte(tmp_path: Path) -> None:
    run_ranks(1, _counts_memory, str(tmp_path))


def _counts_memory(path: str) -> None:
    for more in ({"optimizer": "none"}, {"most": 60_000}, {"optimizer": "cpu"}):
        engine = make_engine(away(path, **more, micro=2, bf16=True, keys={"buffer_count": 2}))
        train(engine, range(2), samples=2)
        if deferred_update_of(engine) is not None:
            deferred_update_of(engine).settle()
        report = engine.memory_arenas()
        uses = {use.name: use for use in report.arenas}
        assert uses["parameter shards on a drive"].tier == "disk"
        assert uses["parameter shards on their way"].tier == "host"
        assert ("parameter shards" in uses) == ("most" in more)
        assert report.bytes_in("host") == predicted_host_bytes(engine), more
        counts = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values() if t.ndim == 0)
        assert engine.model_state_bytes() == predicted_bytes(engine) + counts, more
        engine.destroy()


def test_frozen_parameters_are_on_the_disk_and_evaluation_reads_them(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        torch.manual_seed(3)
        return TinyGPT().requires_grad_(False)

    inputs = batches(0, samples=2)[0]
    outputs: list[Tensor] = []
    for settings in (config(3, micro=2), away(str(tmp_path), optimizer="none", micro=2)):
        del settings["optimizer"]
        engine = make_engine(settings, model=frozen())
        with torch.no_grad():
            outputs.append(engine(inputs))
    assert torch.equal(outputs[0], outputs[1])


def test_parameters_are_read_set_saved_and_loaded_between_steps(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for number, settings in enumerate(
        (config(3, micro=2, bf16=True), {**away(str(tmp_path), micro=2, bf16=True), "aio": {"verify": True}})
    ):
        engine = make_engine(settings)
        train(engine, range(2), samples=2)
        param: Any = next(p for p in engine.module.parameters())
        with dsrun.zero.GatheredParameters([param], modifier_rank=0):
            param.data.mul_(2)
        train(engine, range(2, 3), samples=2)
        engine.save_checkpoint(str(tmp_path / f"saved{number}"), tag="t")
        train(engine, range(3, 4), samples=2)
        engine.load_checkpoint(str(tmp_path / f"saved{number}"), tag="t")
        train(engine, range(3, 5), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    assert_same(found[1], found[0])


def test_a_slice_that_cannot_be_read_ends_the_forward_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk()
    monkeypatch.setattr("dsrun.direct_io.extent_file.OsCalls", lambda: disk)
    engine = make_engine(away(str(tmp_path), optimizer="none", micro=2, bf16=True))
    train(engine, range(1), samples=2)
    disk.on_read = lambda at, nbytes: failure(errno.EIO)
    with pytest.raises(OffloadError, match=r"shards of unit [0-9]+ `.*`, byte 0 .* cannot be read: Input/output"):
        train(engine, range(1, 2), samples=2)
