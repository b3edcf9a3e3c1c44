"""Checkpoints of pipelines: saved in some stages and loaded in others, the run goes on as if it had not stopped."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dsrun
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.verbs.compare import tensor_differences
from dsrun.contract.environment import MEMORY_COPY_ENV, RESTART_COUNT_ENV
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.convert.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsrun.runtime.engine.saving.resume_state import RNG_ROLE
from support.cli import invoke
from support.pipelines import (
    LAYERS,
    MICROS,
    VOCABULARY,
    Block,
    Case,
    Ended,
    Model,
    assert_same,
    items,
    layers_of,
    loss_fn,
    run,
    train,
    weights_of,
)
from support.ranks import run_ranks

BEFORE, AFTER = 2, 2

#: Layouts that save, each with those that load what it has saved: the first one by default.
SAVED = [
    (Case(1, plain=True), [Case(2), Case(4, "interleaved", 2)]),
    (Case(2, "1f1b", tied=True), [Case(1, plain=True), Case(2, "zbv", 2, zero=1)]),
    (Case(2, "interleaved", 2, tied=True), [Case(4, "gpipe"), Case(1)]),
    (Case(4, "zero_bubble"), [Case(2, "zbv", 2, zero=2), Case(2, "breadth_first", 2)]),
    (Case(2, "zbv", 2, tied=True, zero=1), [Case(4, "interleaved", 2), Case(1, plain=True, zero=2)]),
    (Case(2, "breadth_first", 2, zero=3, tied=True), [Case(4, "1f1b", zero=3), Case(1, plain=True)]),
    (Case(1, data=2, plain=True, zero=3), [Case(2, "breadth_first", 4, data=2, zero=3)]),
    (Case(2, data=2, zero=2), [Case(1, data=2, plain=True, zero=1), Case(2, "zbv", 2, data=2, zero=1)]),
    (Case(1, data=2, plain=True, zero=1, tied=True), [Case(2, data=2, zero=2), Case(2, "interleaved", 2, data=2)]),
]


def of(case: Case, tied: bool) -> Case:
    """A layout with a model; without clipping where its weights are apart, see below."""
    more = {} if tied else {"gradient_clipping": 0.0}
    return Case(case.stages, case.schedule, case.virtual, case.data, case.zero, tied, plain=case.plain, more=more)


@functools.cache
def never_stopped(data: int, tied: bool) -> tuple[Ended, Path]:
    """The last updates of a run in one stage, and a checkpoint of its end."""
    folder = Path(tempfile.mkdtemp())

    def body(engine: Any, data_rank: int) -> Ended:
        ended = train(engine, data_rank, BEFORE + AFTER)
        engine.save_checkpoint(folder, tag="end")
        return Ended(ended.losses[BEFORE:], ended.norms[BEFORE:], ended.weights)

    return run(of(Case(1, data=data), tied), body)[0], folder / "end"


def differences(one: Path, other: Path) -> list[Any]:
    """Masters, moments, step counts and buffers that differ; random numbers are a rank's own."""
    found = tensor_differences((one, read_index(one)), (other, read_index(other)))
    return [tensor for tensor in found if tensor.role != RNG_ROLE]


BOTH = pytest.mark.soak("one of the two loads")


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        pytest.param(saves, loads[:count], id=f"{saves}{'-tied' * saves.tied}{more}", marks=marks)
        for count, more, marks in ((1, "", ()), (2, ", all", BOTH))
        for saves, loads in SAVED
        if len(loads) >= count
    ],
)
def test_a_run_goes_on_in_other_stages_as_if_it_had_not_stopped(tmp_path: Path, saves: Case, loads: list[Case]) -> None:
    expected, end = never_stopped(saves.data, saves.tied)

    def save(engine: Any, data_rank: int) -> None:
        train(engine, data_rank, BEFORE)
        engine.save_checkpoint(tmp_path, tag="half")

    run(of(saves, saves.tied), save)

    def go_on(engine: Any, data_rank: int) -> Ended:
        engine.load_checkpoint(tmp_path, tag="half")
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(tmp_path, tag="again")
        ended = train(engine, data_rank, AFTER, first=BEFORE)
        engine.save_checkpoint(tmp_path, tag="end")
        return ended

    for case in loads:
        found = run(of(case, saves.tied), go_on)
        assert not differences(tmp_path / "again", tmp_path / "half"), case
        if case.plain or saves.plain:  # the units of a model that is not cut are others: last bits of norm, and of ties
            assert found[0].norms == pytest.approx(expected.norms, rel=1e-6)
            assert found[0].losses == (pytest.approx(expected.losses, rel=1e-6) if saves.tied else expected.losses)
            if saves.tied:
                continue
        else:
            assert_same(found, expected)
        assert not differences(tmp_path / "end", end), case


def test_a_list_of_layers_goes_on_in_other_stages(tmp_path: Path) -> None:
    def updates(engine: Any, batches: Any, count: int) -> Any:
        return [float(engine.train_batch(batches)) for _ in range(count)], engine.get_global_grad_norm()

    def save(engine: Any, data_rank: int) -> Any:
        batches = items(data_rank)
        updates(engine, batches, BEFORE)
        engine.save_checkpoint(tmp_path, tag="half")
        return updates(engine, batches, AFTER)

    def go_on(engine: Any, data_rank: int) -> Any:
        engine.load_checkpoint(tmp_path, tag="half")
        engine.save_checkpoint(tmp_path, tag="again")
        batches = itertools.islice(items(data_rank), BEFORE * MICROS, None)
        return updates(engine, batches, AFTER)

    layouts = [Case(2), Case(1), Case(4), Case(2, "interleaved", 2)]
    expected = run(layouts[0], save, of_rank=layers_of(layouts[0]))[0]
    for case in layouts[1:]:
        assert run(case, go_on, of_rank=layers_of(case)) == [expected] * case.ranks
        assert not differences(tmp_path / "again", tmp_path / "half"), case


def test_the_place_in_the_data_the_schedule_and_the_loss_scale_go_along_to_other_stages(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, VOCABULARY, (22, 9), generator=generator)
    words = {"training_data": [(row[:-1], row[1:]) for row in rows]}
    more = {
        "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}},
        "gradient_clipping": 0.2,
    }

    def updates(engine: Any, count: int) -> list[Any]:
        return [(float(engine.train_batch(loss_fn=loss_fn)), engine.get_lr(), engine.cur_scale) for _ in range(count)]

    def save(engine: Any, data_rank: int) -> Any:
        updates(engine, 4)  # in the second epoch, after steps that overflow
        engine.save_checkpoint(tmp_path)
        return updates(engine, 4)

    def go_on(engine: Any, data_rank: int) -> Any:
        engine.load_checkpoint(tmp_path)
        return updates(engine, 4)

    expected = run(Case(2, more=more), save, **words)[0]
    assert len({scale for _, _, scale in expected}) > 1
    for case in (Case(1, more=more), Case(4, more=more), Case(2, "zbv", 2, more=more)):
        assert run(case, go_on, **words) == [expected] * case.ranks


class Counting(Block):
    """A block with a buffer that counts its forwards, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norm.weight.requires_grad_(False)

    def forward(self, x_BTD: Tensor, mask_T1: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x_BTD, mask_T1) * self.norm.weight.mean()


def with_buffers() -> Model:
    model = Model(tied=True, dropout=0.0)
    for number in range(LAYERS):
        model.blocks[number] = Counting()
    return model


@pytest.mark.parametrize("saves", [Case(2, "zbv", 2), Case(2, data=2, zero=1)], ids=str)
def test_buffers_and_frozen_weights_of_all_stages_are_saved_and_loaded(tmp_path: Path, saves: Case) -> None:
    def save(engine: Any, data_rank: int) -> Any:
        train(engine, data_rank, 1)
        with torch.no_grad():
            for module in engine.module.modules():
                if isinstance(module, Counting):
                    module.norm.weight.fill_(1.5)
        engine.save_checkpoint(tmp_path, tag="half")
        return engine.module_state_dict()

    def load(engine: Any, data_rank: int) -> Any:
        engine.load_checkpoint(tmp_path, tag="half")
        engine.save_checkpoint(tmp_path, tag="again")
        return engine.module_state_dict()

    expected = run(saves, save, with_buffers)[0]
    assert {name: int(value) for name, value in expected.items() if name.endswith("seen")} == {
        f"blocks.{number}.seen": MICROS for number in range(LAYERS)
    }
    assert all(bool((expected[f"blocks.{number}.norm.weight"] == 1.5).all()) for number in range(LAYERS))
    for case in (Case(4), Case(1, plain=True), Case(2, "interleaved", 2)):
        found = run(of(case, tied=True), load, with_buffers)[0]
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not differences(tmp_path / "again", tmp_path / "half"), case


@pytest.fixture(scope="module")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of tied weights in 2 stages of 2 data ranks, and what each rank gave out as weights."""
    folder = tmp_path_factory.mktemp("tied")

    def body(engine: Any, data_rank: int) -> tuple[Any, Any]:
        train(engine, data_rank, 1)
        engine.save_checkpoint(folder, tag="half")
        weights = engine.module_state_dict()
        everywhere = engine.module_state_dict(all_ranks=True)
        engine.save_16bit_model(folder, "model.safetensors")
        engine.save_16bit_model(folder, "model.bin")
        return weights, everywhere

    return folder, run(Case(2, data=2, zero=1, tied=True), body)


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """The weights of the same run in one stage, by the model's names, each once."""

    def body(engine: Any, data_rank: int) -> dict[str, Tensor]:
        return train(engine, data_rank, 1).weights

    return run(Case(1, data=2, zero=1, tied=True), body)[0]


def test_a_checkpoint_has_each_tensor_once_under_its_name_in_the_whole_model(
    tied_run: tuple[Path, list[Any]], whole: dict[str, Tensor]
) -> None:
    index = read_index(tied_run[0] / "half")
    for role in ("param", "exp_avg", "exp_avg_sq"):
        assert sorted(name for name, of_role in index.tensors if of_role == role) == sorted(whole)
    assert dict(index.aliases) == {"head.weight": "embedding.weight"}


def test_files_of_other_programs_get_the_whole_model_with_tied_names(
    tied_run: tuple[Path, list[Any]], whole: dict[str, Tensor]
) -> None:
    folder, of_ranks = tied_run
    expected = {**whole, "head.weight": whole["embedding.weight"]}
    order = list(Model(tied=True, dropout=0.0).state_dict())
    export = invoke("checkpoint", "export", "--dtype", "fp32", str(folder), str(folder / "exported"))
    assert export.exit_code == 0, export.stderr
    found = {
        "module_state_dict": of_ranks[0][0],
        "zero_to_fp32": get_fp32_state_dict_from_zero_checkpoint(str(folder), "half"),
        "save_16bit_model, torch": torch.load(folder / "model.bin", weights_only=True),
        "save_16bit_model": load_file(folder / "model.safetensors"),
        "export": load_file(folder / "exported" / "model.safetensors"),
        **{f"all_ranks, rank {rank}": everywhere for rank, (_, everywhere) in enumerate(of_ranks)},
    }
    assert [weights for weights, _ in of_ranks[1:]] == [None] * 3
    for source, weights in found.items():
        # A file of safetensors may have tied weights once.
        assert set(weights) in (set(expected), set(whole)), source
        assert all(torch.equal(value, expected[name]) for name, value in weights.items()), source
        if source.startswith(("module", "all_ranks")):
            assert sorted(weights) == sorted(order), source
    again = found["module_state_dict"]
    assert again["head.weight"].data_ptr() == again["embedding.weight"].data_ptr()
    Model(tied=True, dropout=0.0).load_state_dict(again)


def test_verbs_of_the_checkpoint_command_read_one_of_all_stages(tied_run: tuple[Path, list[Any]]) -> None:
    folder = str(tied_run[0])
    for words in (("show", folder), ("verify", folder), ("diff", folder, folder)):
        found = invoke("checkpoint", *words)
        assert found.exit_code == 0, (words, found.stderr)


def _engine_with_copies(folder: str, attempt: int, seed: int) -> Any:
    """An engine of two stages, each on a host of its own, which keeps copies in memory."""
    rank = os.environ["RANK"]
    os.environ.update({"NODE_RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": "0"})
    os.environ.update({MEMORY_COPY_ENV: f"{folder}/host{rank}", RESTART_COUNT_ENV: str(attempt)})
    torch.manual_seed(seed)
    more = {"checkpoint": {"asynchronous": False, "memory_copy": {"every": BEFORE}}}
    case = Case(2, zero=1, tied=True, more=more)
    return dsrun.initialize(model=Model(tied=True, dropout=0.0), config=case.config())[0]


def _train_with_copies(folder: str) -> Ended:
    engine = _engine_with_copies(folder, 0, seed=7)
    engine.load_checkpoint(f"{folder}/none", missing_ok=True)
    train(engine, 0, BEFORE)
    engine.wait_for_checkpoint()
    return train(engine, 0, 1, first=BEFORE)


def _go_on_from_copies(folder: str) -> tuple[Ended, str | None]:
    engine = _engine_with_copies(folder, 1, seed=8)
    path, _ = engine.load_checkpoint(f"{folder}/none", missing_ok=True)
    return train(engine, 0, 1, first=BEFORE), path


@pytest.mark.parametrize("lost", [None, 1])
def test_stages_go_on_from_copies_in_memory_also_where_a_host_came_back_empty(tmp_path: Path, lost: int | None) -> None:
    before = run_ranks(2, _train_with_copies, str(tmp_path))
    if lost is not None:
        shutil.rmtree(tmp_path / f"host{lost}")
    after = run_ranks(2, _go_on_from_copies, str(tmp_path))
    for rank, (expected, (found, path)) in enumerate(zip(before, after, strict=True)):
        assert path == str(tmp_path / f"host{rank}")
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize("case", [Case(2), Case(2, "zbv", 2), Case(4)], ids=str)
def test_a_checkpoint_of_another_model_is_refused_by_its_tensors_on_every_rank(tmp_path: Path, case: Case) -> None:
    def save(engine: Any, data_rank: int) -> None:
        train(engine, data_rank, 1)
        engine.save_checkpoint(tmp_path)

    run(Case(2), save, lambda: Model(tied=False, dropout=0.0, layers=LAYERS + 1))

    def load(engine: Any, data_rank: int) -> str:
        with pytest.raises(CheckpointError) as refused:
            engine.load_checkpoint(tmp_path)
        before = weights_of(engine)
        train(engine, data_rank, 1)  # nothing was changed: it trains on
        assert any(not torch.equal(before[name], value) for name, value in weights_of(engine).items())
        return str(refused.value)

    for text in run(case, load):
        assert f"blocks.{LAYERS}." in text
