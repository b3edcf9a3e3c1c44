"""Checkpoints that DeepSpeed itself saved become dsrun's, to the bit, and nothing in their pickles is run."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dsrun
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.errors import CheckpointError, InputError
from dsrun.runtime.checkpoint.convert.dcp import _Item as dcp_item
from dsrun.runtime.checkpoint.convert.main import import_checkpoint
from dsrun.runtime.checkpoint.convert.pickles import read_torch_file
from dsrun.runtime.checkpoint.format.load import read_whole
from support.cli import invoke
from support.odd_files import put_in_place
from support.ranks import run_ranks

MADE = Path(__file__).parents[3] / "fixtures" / "deepspeed_checkpoints"
KINDS = ["stage0", "stage1", "stage2", "stage3", "universal_of_stage1", "universal_of_stage3"]
TAG = "global_step3"


def imported(source: Path, out: Path, **changes: Any) -> Path:
    words: dict[str, Any] = {"tag": None, "trust_pickle": True, "ignored": [], "optimizer": None, "buffers": []}
    return import_checkpoint(source, out, **{**words, **changes})[0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_states_and_buffers_are_deepspeeds_to_the_bit(tmp_path: Path, kind: str) -> None:
    target = imported(MADE / kind, tmp_path)
    index = read_index(target)
    assert list(verify(target, index)) == []
    expected = load_file(MADE / kind / "expected.safetensors")
    assert {f"{name}:{role}" for name, role in index.tensors if "scalar" not in role} == set(expected)
    for key, tensor in expected.items():
        name, role = key.split(":")
        found = read_whole(index, target, [name], role=role)[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), key
    trained = [name for name, role in index.tensors if role == "exp_avg"]
    assert len(trained) == 5
    steps = read_whole(index, target, trained, role="scalar:step")
    assert {step.item() for step in steps.values()} == {3.0}
    assert index.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_counters_options_schedule_and_client_state_come_too(tmp_path: Path, kind: str) -> None:
    target = imported(MADE / kind, tmp_path)
    values = read_index(target).values
    assert target.name == TAG
    assert (tmp_path / "latest").read_text() == TAG
    assert values["counters"] == {"micro_steps": 3, "global_steps": 3, "global_samples": 12, "skipped_steps": 0}
    assert values["scheduler"] == {"type": "WarmupLR", "state": {"last_batch_iteration": 2}}
    assert values["client_state"] == {"epoch": 2, "note": "tiny"}
    assert values["optimizer"]["type"] == "AdamW"
    assert [group["weight_decay"] for group in values["optimizer"]["groups"]] == [0.1, 0.0]
    assert values["imported"].startswith("DeepSpeed 0.19.8")


class Tiny(nn.Module):
    """The model of the fixtures, see their make.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens_B: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.embed(tokens_B)))
        return self.head(self.frozen(hidden)).float().square().mean()


def _go_on(folder: str) -> tuple[int, float, dict[str, float], float]:
    """Loads at stage 2, and returns steps, learning rate, the Adam steps, and the loss of a further step."""
    torch.manual_seed(2)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2},
    }
    engine, _, _, _ = dsrun.initialize(model=model, optimizer=optimizer, config=config)
    _, state = engine.load_checkpoint(folder)
    assert state == {"epoch": 2, "note": "tiny"}
    rate = engine.get_lr()[0]
    loss = engine(torch.tensor([engine.global_rank, 3]))
    engine.backward(loss)
    engine.step()
    weights = engine.module_state_dict(all_ranks=True)
    assert weights is not None
    sums = {name: float(value.double().sum()) for name, value in weights.items()}
    engine.destroy()
    return engine.global_steps, rate, sums, float(loss.detach())


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_goes_on_from_what_was_imported(tmp_path: Path, size: int) -> None:
    imported(MADE / "stage2", tmp_path)
    expected = load_file(MADE / "stage2" / "expected.safetensors")
    plain = Tiny()
    named = {key.split(":")[0]: value for key, value in expected.items() if key.split(":")[1] in ("param", "buffer")}
    plain.load_state_dict({**named, "head.weight": named["embed.weight"]})
    results = run_ranks(size, _go_on, str(tmp_path))
    for rank, (steps, rate, sums, loss) in enumerate(results):
        assert steps == 4
        assert rate == 0.004771212547196624, "DeepSpeed's after three steps"
        assert loss == plain(torch.tensor([rank, 3])).item()
        assert sums == results[0][2]
        assert sums["embed.weight"] != float(named["embed.weight"].double().sum()), "the step did something"
        assert sums["frozen.weight"] == float(named["frozen.weight"].double().sum())


def test_nothing_is_read_unless_pickles_are_trusted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its files are pickles"):
        imported(MADE / "stage1", tmp_path / "out", trust_pickle=False)
    result = invoke("checkpoint", "import", str(MADE / "stage1"), str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pass --trust-pickle" in result.stderr
    assert not (tmp_path / "out").exists()


class Payload:
    """Unpickled in the usual way, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("ignored", [[], ["posix.mkdir"]])
def test_a_payload_is_named_and_never_run(tmp_path: Path, file: str, ignored: list[str]) -> None:
    source, trap = tmp_path / "source", tmp_path / "trap"
    shutil.copytree(MADE / "stage1", source)
    path = source / TAG / file
    state = torch.load(path, weights_only=True) if "model" in file else {"optimizer_state_dict": {}}
    torch.save({**state, "payload": Payload(trap)}, path)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir" if not ignored else "cannot be read|not as DeepSpeed"):
        imported(source, tmp_path / "out", ignored=ignored)
    assert not trap.exists()
    assert not (tmp_path / "out").exists()
    torch.load(path, weights_only=False)
    assert trap.exists(), "in the usual way it is run"


def test_a_bare_pickle_is_not_read_either(tmp_path: Path) -> None:
    source, trap = tmp_path / "source", tmp_path / "trap"
    shutil.copytree(MADE / "stage0", source)
    (source / TAG / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps({"module": Payload(trap)}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        imported(source, tmp_path / "out")
    assert not trap.exists()


def test_a_class_that_is_not_known_can_be_read_as_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MADE / "stage1", source)
    path = source / TAG / "mp_rank_00_model_states.pt"
    from argparse import Namespace

    torch.save({**torch.load(path, weights_only=True), "args": Namespace(lr=1)}, path)
    with pytest.raises(CheckpointError, match=r"its pickle names `argparse\.Namespace`"):
        imported(source, tmp_path / "out")
    result = invoke(
        "checkpoint", "import", "--trust-pickle", "--ignore", "argparse.Namespace", str(source), str(tmp_path / "out")
    )
    assert (result.exit_code, result.stdout.split()[0]) == (0, str(tmp_path / "out" / TAG))
    assert read_index(tmp_path / "out" / TAG).values["client_state"] == {"epoch": 2, "note": "tiny"}


@pytest.mark.parametrize("text", ["../stage1", "/etc", "gone", "", "a\nb"])
def test_a_hostile_latest_leads_nowhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "latest").write_text(text)
    with pytest.raises(CheckpointError, match="which is no checkpoint of DeepSpeed's here"):
        imported(tmp_path / "source", tmp_path / "out")
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        imported(MADE / "stage1", tmp_path / "out", tag="../x")


def test_what_is_no_file_is_named_by_what_it_is_and_not_waited_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MADE / "stage1", source)
    said = "it is a FIFO .*; expected a regular file"
    put_in_place(source / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "FIFO")
    with pytest.raises(CheckpointError, match=f"optim_states.pt: cannot be read: {said}"):
        imported(source, tmp_path / "out")
    put_in_place(source / "latest", "FIFO")
    with pytest.raises(CheckpointError, match=f"latest: cannot be read: {said}"):
        imported(source, tmp_path / "out")
    (tmp_path / "dcp").mkdir()
    item = dcp_item(tmp_path / "dcp" / "__0_0.distcp", 0, 8, frozenset())
    put_in_place(item.path, "FIFO")
    with pytest.raises(CheckpointError, match=f"distcp: cannot be read: {said}"):
        item.read()


def test_what_cannot_be_put_together_is_refused_by_name(tmp_path: Path) -> None:
    for name, what in (
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "p"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
    ):
        source = tmp_path / name
        shutil.copytree(MADE / "stage1", source)
        shutil.copy(source / TAG / "mp_rank_00_model_states.pt", source / TAG / name)
        with pytest.raises(CheckpointError, match=what):
            imported(source, tmp_path / "out")
    (tmp_path / "rank_gone").mkdir()
    shutil.copytree(MADE / "stage1" / TAG, tmp_path / "rank_gone" / TAG)
    (tmp_path / "rank_gone" / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="1 optimizer files are there, of 2 ranks"):
        imported(tmp_path / "rank_gone" / TAG, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tag_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    imported(MADE / "stage1", tmp_path)
    with pytest.raises(CheckpointError, match="it is there already"):
        imported(MADE / "stage2", tmp_path)
    assert imported(MADE / "stage2", tmp_path, tag="second", optimizer="Lion").name == "second"
    assert read_index(tmp_path / "second").values["optimizer"]["type"] == "Lion"


def saved_with(tmp_path: Path, **more: object) -> Path:
    """A copy of the checkpoint of stage 2 whose optimizer's state has other values."""
    source = tmp_path / "source"
    shutil.copytree(MADE / "stage2", source)
    for path in (source / TAG).glob("*optim_states.pt"):
        state = read_torch_file(path, ignored=[])
        of_optimizer = {k: v for k, v in state["optimizer_state_dict"].items() if k != "param_slice_mappings"}
        torch.save({"optimizer_state_dict": {**of_optimizer, **more}}, path)
    return source


def test_a_dynamic_loss_scale_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepspeed.runtime.fp16.loss_scaler"
    attributes = {"cur_scale": 512.0, "cur_iter": 3, "last_overflow_iter": 1, "cur_hysteresis": 2, "dynamic": True}
    scaler = type("DynamicLossScaler", (), {"__module__": name})
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[name], "DynamicLossScaler", scaler)  # noqa: B010
    made = scaler()
    vars(made).update(attributes)
    target = imported(saved_with(tmp_path, zero_stage=2, loss_scaler=made), tmp_path / "out")
    expected = {"scale": 512.0, "hysteresis": 2, "steps": 3, "last_overflow": 1}
    assert read_index(target).values["loss_scale"] == expected


@pytest.mark.parametrize("member", ["gradients", "__class__"])
def test_the_stage_as_an_enum_that_is_pickled_by_getattr_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    module = "deepspeed.runtime.zero.config"
    stage = type("ZeroStageEnum", (), {"__module__": module, "gradients": 2})
    # Python 3.11.0 to 3.11.3 pickles a member so.
    asks = type("Asks", (), {"__reduce__": lambda _: (getattr, (stage, member))})
    for part in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", module):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[module], "ZeroStageEnum", stage)  # noqa: B010
    source = saved_with(tmp_path, zero_stage=asks(), loss_scaler=1.0)
    if member == "gradients":
        assert read_index(imported(source, tmp_path / "out")).values["optimizer"]["type"] == "AdamW"
    else:
        with pytest.raises(CheckpointError, match="`getattr` for '__class__', which is no member of the enum"):
            imported(source, tmp_path / "out")
