"""Safetensors files into models of every kind: each rank reads what it owns, and what does not fit is one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dsrun
from dsrun import zero
from dsrun.errors import CheckpointError, ModelError
from dsrun.runtime.zero.creation.stored_files import StoredTensor, find_tensors
from support.models import TinyGPT
from support.odd_files import put_in_place
from support.ranks import run_ranks
from support.training import config, frozen_parameters, full_parameters, make_engine, train


def weights(*, seed: int = 1, tied: bool = False) -> TinyGPT:
    torch.manual_seed(seed)
    model = TinyGPT(tied=tied)
    model.scale.fill_(1.5)
    return model


def save_sharded(state: dict[str, Tensor], folder: Path, *, files: int = 2) -> None:
    """As Hugging Face's `save_pretrained` does."""
    names = list(state)
    parts = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, part in parts.items():
        save_file({name: state[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def target(kind: str) -> TinyGPT:
    torch.manual_seed(7)
    if kind == "meta":
        with torch.device("meta"):
            model = TinyGPT(tied=True)
    elif kind == "slices":
        with zero.Init():
            model = TinyGPT(tied=True)
    else:
        model = TinyGPT(tied=True)
    model.blocks[1].requires_grad_(False)
    return model


def _load(stage: int, kind: str, folder: str, bf16: bool) -> list[Any]:
    model = target(kind)
    if kind != "engine":
        zero.load_pretrained(model, folder)
    engine = make_engine(config(stage, micro=2, bf16=bf16), model=model)
    if kind == "engine":
        zero.load_pretrained(engine.module, folder)
    frozen = {name: value.float() for name, value in frozen_parameters(engine).items()}
    found = {**full_parameters(engine), **frozen}
    return [found, float(model.scale), train(engine, range(2), samples=2 * engine.world_size)]


CASES = [
    ("meta", 3),
    ("slices", 3),
    ("engine", 3),
    ("plain", 3),
    ("meta", 0),
    ("meta", 2),
    ("engine", 0),
    ("engine", 1),
]


@pytest.mark.parametrize("bf16", [False, True])
def test_every_kind_of_model_gets_the_files_values_at_every_stage(bf16: bool, tmp_path: Path) -> None:
    source = weights(tied=True)
    if bf16:
        source = source.bfloat16()
    state = source.state_dict()
    del state["head.weight"]  # tied: one name is enough
    save_sharded(state, tmp_path)
    expected = {name: param.detach().float() for name, param in source.named_parameters()}
    losses: list[list[float]] = []
    for kind, stage in CASES[:: 2 if bf16 else 1]:
        for found, scale, trained in run_ranks(2, _load, stage, kind, str(tmp_path), bf16):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), (kind, stage, name)
            assert scale == 1.5
            losses.append(trained)
    assert all(other == losses[0] for other in losses)


def _read_bytes(path: str) -> tuple[int, int]:
    reads: list[int] = []

    class Counted(StoredTensor):
        def read(self, start: int, stop: int) -> Tensor:
            reads.append(stop - start)
            return super().read(start, stop)

    dsrun.init_distributed()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    zero.load_pretrained(model, path)
    for param in model.parameters():
        home: Any = param._dsrun_home  # type: ignore[attr-defined]
        home.stored = Counted(*(getattr(home.stored, field) for field in StoredTensor.__slots__))
    engine = dsrun.initialize(model=model, config=config(3, micro=2))[0]
    return sum(reads), engine.counters().collectives.calls["broadcast"]


def test_a_rank_reads_its_own_part_and_nothing_is_sent(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    ranks = run_ranks(2, _read_bytes, str(tmp_path))
    assert sum(reads for reads, _ in ranks) == sum(p.numel() for p in model.parameters())
    assert max(reads for reads, _ in ranks) < 0.52 * sum(reads for reads, _ in ranks)
    assert [broadcasts for _, broadcasts in ranks] == [0, 0]


def test_everything_that_does_not_fit_is_named_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    state = weights().state_dict()
    del state["norm.bias"], state["scale"]
    state["position"] = torch.zeros(3)
    state["stranger"] = torch.zeros(2)
    save_file(state, tmp_path / "one.safetensors")
    model = weights(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        zero.load_pretrained(model, tmp_path / "one.safetensors")
    assert [problem.message.removeprefix(f"{tmp_path}/one.safetensors: ") for problem in caught.value.problems] == [
        "`position` has shape (3,); the model's has (12, 72)",
        "no `norm.bias`, which the model has",
        "no `scale`, which the model has",
        "`stranger` is not in the model",
    ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="has shape") as caught:
        zero.load_pretrained(model, tmp_path / "one.safetensors", strict=False)
    assert len(caught.value.problems) == 1
    del state["position"]
    save_file(state, tmp_path / "one.safetensors")
    zero.load_pretrained(model, tmp_path, strict=False)
    assert torch.equal(model.embed.weight, weights().embed.weight)
    assert torch.equal(model.norm.bias, before["norm.bias"])


def test_what_the_files_lack_is_drawn_where_a_module_can_draw_it(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    zero.load_pretrained(model, tmp_path, strict=False)
    context = zero.GatheredParameters(model[0].weight)
    with pytest.raises(ModelError, match=r"the values of `0\.weight` are still in .*model\.safetensors"), context:
        pass
    engine = make_engine(config(3, micro=2), model=model)
    found = full_parameters(engine)
    assert bool((found["0.weight"] == 1).all())
    assert bool(found["1.weight"].isfinite().all())
    assert float(found["1.weight"].std()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_values_are_converted_to_the_models_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4).to(dtype)
    save_file({"weight": values, "bias": torch.zeros(3, dtype=dtype)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 3)
    zero.load_pretrained(model, tmp_path)
    assert model.weight.dtype == torch.float32
    assert model.weight.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    for path, text in (
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path, "0 safetensors files and no model.safetensors.index.json"),
    ):
        with pytest.raises(CheckpointError, match=text):
            zero.load_pretrained(model, path)
    whole = tmp_path / "model.safetensors"
    save_file(model.state_dict(), whole)
    data = whole.read_bytes()
    for cut in (0, 4, 40, len(data) - 1):
        whole.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: no readable safetensors file"):
            zero.load_pretrained(model, tmp_path)
    whole.write_bytes(data)
    stored = find_tensors(tmp_path)["weight"]
    whole.write_bytes(data[:-60])
    with pytest.raises(CheckpointError, match="`weight` cannot be read: the file has been cut off"):
        stored.read(0, 12)
    whole.unlink()
    with pytest.raises(CheckpointError, match="`weight` cannot be read"):
        stored.read(0, 12)
    save_sharded(model.state_dict(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": {"weight": "model-00001-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"}}
        )
    )
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors does not hold `x`"):
        zero.load_pretrained(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no readable index"):
        zero.load_pretrained(model, tmp_path)


class Rotary(nn.Module):
    """Two names of one buffer, and a buffer that state dicts do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cosines", torch.ones(4))
        self.register_buffer("same", self.cosines)
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_buffers_are_loaded_under_any_name_and_stay_shared(device: str, tmp_path: Path) -> None:
    state = {"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4), "same": torch.full((4,), 3.0)}
    save_file(state, tmp_path / "model.safetensors")
    with torch.device(device):
        model = Rotary()
    zero.load_pretrained(model, tmp_path)
    assert model.same is model.cosines
    assert model.cosines.tolist() == [3.0] * 4
    save_file({**state, "cosines": torch.zeros(4)}, tmp_path / "model.safetensors")
    zero.load_pretrained(model, tmp_path)
    save_file({**state, "mask": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="`mask` is not in the model"):
        zero.load_pretrained(model, tmp_path)


def test_a_pipe_is_named_by_what_it_is_and_not_waited_for(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    stored = find_tensors(tmp_path / "b.safetensors")["a"]
    put_in_place(tmp_path / "b.safetensors", "FIFO")
    said = "it is a FIFO .*; expected a regular file"
    with pytest.raises(CheckpointError, match=f"b.safetensors: no readable safetensors file: {said}"):
        find_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=f"b.safetensors: `a` cannot be read: {said}"):
        stored.read(0, 2)
