"""Whole weights out of an engine and back in, at every stage."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dsrun
from dsrun.errors import CheckpointError, InputError, ModelError
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, frozen_parameters, full_parameters, make_engine, train


def _model(tied: bool) -> TinyGPT:
    torch.manual_seed(7)
    model = TinyGPT(tied=tied)
    model.blocks[1].requires_grad_(False)
    return model


def _export(stage: int, folder: str) -> list[Any]:
    engine = make_engine(config(stage, micro=2, bf16=True), model=_model(tied=True))
    train(engine, range(2), samples=2 * engine.world_size)
    before = engine.counters()
    on_first = engine._consolidated_16bit_state_dict()
    gathers = engine.counters().since(before).collectives.calls["all_gather"]
    everywhere = engine.module_state_dict(all_ranks=True)
    trained = engine.module_state_dict(True)
    assert engine.save_16bit_model(folder, exclude_frozen_parameters=False)
    assert engine.save_16bit_model(Path(folder) / "deeper", "model.safetensors")
    masters = full_parameters(engine)
    assert all(torch.equal(masters[n].bfloat16(), v) for n, v in everywhere.items() if n in masters)
    names = None if trained is None else sorted(trained)
    return [on_first is not None, gathers, {n: v.clone() for n, v in everywhere.items()}, names]


def test_every_stage_exports_what_a_plain_model_would(tmp_path: Path) -> None:
    plain = _model(tied=True)
    results = {stage: run_ranks(2, _export, stage, str(tmp_path / str(stage))) for stage in (0, 2, 3)}
    units = 4  # two blocks are trained, one is frozen, and the rest holds the tied weight
    first = results[0][0][2]
    assert list(first) == list(plain.state_dict())
    for stage, ranks in results.items():
        assert [rank[0] for rank in ranks] == [True, False], "rank 0 has it"
        assert [rank[1] for rank in ranks] == [units if stage == 3 else 0] * 2, "one all-gather a unit"
        for rank in ranks:
            assert all(torch.equal(rank[2][name], value) for name, value in first.items())
        assert ranks[0][3] == sorted(n for n in first if not n.startswith("blocks.1."))
        assert ranks[1][3] is None
        saved = torch.load(tmp_path / str(stage) / "pytorch_model.bin")
        assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()
        other = load_file(tmp_path / str(stage) / "deeper" / "model.safetensors")
        for name, value in first.items():
            assert torch.equal(saved[name], value)
            assert torch.equal(other[name], value)
        plain.load_state_dict(saved)
        assert sorted(path.name for path in (tmp_path / str(stage)).iterdir()) == ["deeper", "pytorch_model.bin"]


def _import(stage: int) -> list[Any]:
    engine = make_engine(config(stage, micro=2, bf16=True), model=_model(tied=False))
    torch.manual_seed(1)
    other = TinyGPT()
    other.scale.fill_(1.5)
    engine.load_module_state_dict(other.state_dict())
    expected = dict(other.named_parameters())
    masters = full_parameters(engine)
    right = all(torch.equal(value, expected[name]) for name, value in masters.items())
    frozen = frozen_parameters(engine)["blocks.1.up.weight"]
    right &= torch.equal(frozen, expected["blocks.1.up.weight"].bfloat16())
    return [right, float(engine.module.scale), train(engine, range(2), samples=2 * engine.world_size)]


def test_whole_weights_come_back_with_their_masters_at_every_stage() -> None:
    results = [rank for stage in (0, 1, 3) for rank in run_ranks(2, _import, stage)]
    for right, scale, losses in results:
        assert right
        assert scale == 1.5
        assert losses == results[0][2]


def test_what_does_not_fit_or_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    engine = make_engine(config(3, micro=2))
    before = full_parameters(engine)
    state = TinyGPT().state_dict()
    del state["norm.bias"]
    state["position"] = torch.zeros(3)
    state["stranger"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        engine.load_module_state_dict(state)
    assert [problem.message for problem in caught.value.problems] == [
        "load_module_state_dict: `position` has shape (3,); the model's has (12, 72)",
        "load_module_state_dict: no `norm.bias`, which the model has",
        "load_module_state_dict: `stranger` is not in the model",
    ]
    assert all(torch.equal(value, before[name]) for name, value in full_parameters(engine).items())
    with pytest.raises(InputError, match="save_dir is empty"):
        engine.save_16bit_model("")
    (tmp_path / "file").write_text("")
    for name in ("pytorch_model.bin", "model.safetensors"):
        with pytest.raises(CheckpointError, match="rank 0 could not write"):
            engine.save_16bit_model(tmp_path / "file", name)


def _in_shards(stage: int, folder: str) -> None:
    engine = make_engine(config(stage, micro=2), model=_model(tied=True))
    engine.save_16bit_model(folder, "model.safetensors", max_shard_bytes=100_000)


@pytest.mark.parametrize("stage", [0, 3])
def test_shards_have_an_index_by_which_the_whole_is_read(stage: int, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("of before, which loaders would prefer")
    run_ranks(2, _in_shards, stage, str(tmp_path))
    expected = _model(tied=True).state_dict()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 2
    assert {path.name for path in tmp_path.iterdir()} == {*shards, "model.safetensors.index.json"}
    for shard in shards:
        held = load_file(tmp_path / shard)
        assert sum(value.nbytes for value in held.values()) <= 100_000 or len(held) == 1
        assert all(torch.equal(value, expected[name]) for name, value in held.items())
    other = make_engine(config(1, micro=2), model=TinyGPT())
    dsrun.zero.load_pretrained(other.module, tmp_path, strict=False)
    assert torch.equal(full_parameters(other)["position"], expected["position"])
    other.save_16bit_model(tmp_path, "model.safetensors")
    assert not (tmp_path / "model.safetensors.index.json").exists(), "it would be read in place of the new file"


def test_shards_of_torchs_format_are_refused(tmp_path: Path) -> None:
    engine = make_engine(config(0, micro=2))
    for name, most in (("pytorch_model.bin", 1000), ("model.safetensors", 0)):
        with pytest.raises(InputError, match=f"max_shard_bytes is {most}, for {name}"):
            engine.save_16bit_model(tmp_path, name, max_shard_bytes=most)


def test_an_export_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = make_engine(config(3, micro=2))
    refused: list[str] = []

    def save(module: nn.Module, args: Any) -> None:
        with pytest.raises(ModelError, match="called inside the forward of `head`") as caught:
            engine.save_16bit_model(tmp_path, "model.safetensors")
        refused.append(str(caught.value))

    engine.module.head.register_forward_pre_hook(save)
    engine(torch.zeros(2, 12, dtype=torch.int64))
    assert len(refused) == 1
    engine.module.register_buffer("strange", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"rank 0 could not write: .*`strange` is torch\.complex128"):
        engine.save_16bit_model(tmp_path, "model.safetensors")
    assert not list(tmp_path.iterdir())


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside of it that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self._alive[id(tensor)] = (storage.data_ptr(), storage.nbytes())
                weakref.finalize(tensor, self._alive.pop, id(tensor), None)
        self.most = max(self.most, sum(dict(self._alive.values()).values()))
        return made


WIDE_BYTES = 256 * 256 * 4


def _largest_at_once(stage: int, folder: str) -> list[int]:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh())) for _ in range(8)]
    engine = make_engine(config(stage, micro=2), model=nn.Sequential(*blocks))
    most: list[int] = []
    for work in (lambda: engine.module_state_dict(), lambda: engine.save_16bit_model(folder, "model.safetensors")):
        with Live() as live:
            work()
        most.append(live.most)
    return most


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_does_not_write_never_holds_more_than_one_unit_of_the_whole(stage: int, tmp_path: Path) -> None:
    writer, other = run_ranks(2, _largest_at_once, stage, str(tmp_path))
    returned, written = writer
    assert 8 * WIDE_BYTES <= returned <= 9.1 * WIDE_BYTES, "the whole model, which is what it returns"
    assert written <= (1.1 * WIDE_BYTES if stage == 3 else 4096), "files are written as the units come"
    assert max(other) <= (1.1 * WIDE_BYTES if stage == 3 else 4096)
    assert stage < 3 or min(other) >= WIDE_BYTES
