"""What an engine counts of collectives, its bus and drives stands still once it was asked for."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_ranks
from support.training import config, make_engine, train


def _sent() -> tuple[dict[str, int], dict[str, int], int]:
    engine = make_engine(config(2, micro=2))
    train(engine, range(1), samples=2 * engine.world_size)
    before = engine.counters()
    asked = dict(before.collectives.calls)
    train(engine, range(1, 2), samples=2 * engine.world_size)
    assert before.collectives.calls == asked, "it stands still"
    assert engine.counters().bus.out_bytes == engine.counters().drives.read_bytes == 0
    moved = engine.counters().since(before).collectives
    return dict(moved.calls), dict(moved.bytes), asked["reduce_scatter"]


def test_collectives_are_counted_by_kind_and_between_two_moments() -> None:
    for calls, sizes, in_the_first_step in run_ranks(2, _sent):
        assert calls["reduce_scatter"] == in_the_first_step
        assert calls.keys() == sizes.keys() == {"all_gather", "all_reduce", "reduce_scatter"}
        assert all(sizes.values())


def test_the_bus_and_drives_are_counted_where_an_optimizer_uses_them(tmp_path: Path) -> None:
    settings = config(2, micro=2, bf16=True)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    engine = make_engine(settings)
    at_first = engine.counters()
    train(engine, range(2), samples=2)
    engine.destroy()
    moved = engine.counters().since(at_first)
    assert moved.bus.out["gradients"].calls == moved.bus.back["parameters"].calls > 0
    assert moved.drives.read_bytes > 0
    assert moved.drives.written_bytes > 0
    assert at_first.bus.out["gradients"].calls == 0
