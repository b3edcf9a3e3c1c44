"""OpenRLHF as it is, on dsrun: its strategy class as its trainers drive it, and its own programs for SFT and DPO.

What is looked at is what the engines counted, the losses, and the files. The oracle of the strategy class is the same
training in plain torch; OpenRLHF's programs know bfloat16 alone, and are compared over the stages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import kits
from support.clients import Job

kits.need("openrlhf")

pytestmark = pytest.mark.timeout(kits.DEADLINE_S)

WAYS = ["0", "1o", "3", "3o"]
UPDATES = 4
SFT = ["2", "3-offload"]
DPO = ["2", "3"]
PROGRAM = "openrlhf_program.py"


def _words(name: str) -> list[str]:
    """Words of every program: a tiny model on the CPU in batches of 8."""
    stage, _, offload = name.partition("-")
    words = {
        "--ds.zero_stage": stage,
        "--ds.attn_implementation": "eager",
        "--model.model_name_or_path": "pretrained",
        "--data.max_len": "32",
        "--train.batch_size": "8",
        "--train.micro_batch_size": "2",
        "--adam.lr": "1e-2",
    }
    flags = ["--ds.adam_offload", "--model.gradient_checkpointing_enable"] if offload else []
    return [word for pair in words.items() for word in pair] + flags


def _sft(name: str, *more: str, out: str = "sft") -> list[str]:
    data = ["--data.dataset", "sft.jsonl", "--data.output_key", "output", "--data.input_template", "{}"]
    saves = ["--ckpt.save_steps", "2", "--ckpt.path", f"sft/{name}/ckpt"]
    target = ["--ckpt.output_dir", f"{out}/{name}", "--train.max_epochs", "1"]
    return [PROGRAM, "train_sft", *_words(name), *data, *saves, *target, *more]


def _dpo(name: str) -> list[str]:
    data = ["--data.dataset", "preferences.jsonl", "--data.prompt_key", "prompt"]
    out = ["--ref.model_name_or_path", "pretrained", "--ckpt.output_dir", f"dpo/{name}"]
    return [PROGRAM, "train_dpo", *_words(name), *data, *out]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openrlhf")
    samples = [{"input": f"w{word} w{word + 1}", "output": f"w{word + 2} w{word + 3}"} for word in range(24)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    kits.run_alone(
        folder,
        ["openrlhf_strategy.py", "plain", "--out", "strategy"],
        ["trl_tiny.py", "pretrained", "--preferences", "preferences.jsonl"],
    )
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Job:
    return kits.run_on_dsrun(
        folder,
        ["openrlhf_strategy.py", *WAYS, "2m", "3m", "--out", "strategy"],
        *(_sft(name) for name in SFT),
        *(_dpo(name) for name in DPO),
        _sft("3-offload", "--ckpt.load_enable", out="resumed"),
    )


def _facts(folder: Path, way: str) -> dict[str, Any]:
    return kits.facts(folder / "strategy" / way)[0]


def _weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_every_engine_did_the_updates_that_its_program_counts(ranks: Job) -> None:
    # Each way: two that evaluate, the policy, one more that evaluates, and one that goes on from the middle. A program
    # of preferences has a reference beside its policy; its 20 samples are two batches and a rest.
    strategy = [0, 0, UPDATES, 0, UPDATES // 2] * len(WAYS)
    assert ranks.updates == [*strategy, UPDATES, UPDATES, *[3] * len(SFT), *[0, 2] * len(DPO), 1]


def test_losses_norms_and_rates_are_those_of_plain_torch_at_every_stage(folder: Path, ranks: Job) -> None:
    plain, first = _facts(folder, "plain"), _facts(folder, WAYS[0])
    straight = len(plain["losses"])
    # The strategy tells what it reads after each micro batch: an update is every second one.
    assert first["losses"][:straight] == pytest.approx(plain["losses"], rel=1e-5)
    assert first["norms"][1:straight:2] == pytest.approx(plain["norms"], rel=1e-5)
    assert first["rates"][1:straight:2] == plain["rates"]
    for way in WAYS:
        facts = _facts(folder, way)
        assert facts["accumulation"] == 2
        for key in ("losses", "norms", "rates"):
            assert facts[key] == first[key], (way, key)


@pytest.mark.parametrize("model", ["policy", "average"])
def test_saved_models_are_those_of_plain_torch_and_the_same_at_every_stage(
    folder: Path, ranks: Job, model: str
) -> None:
    from transformers import AutoModelForCausalLM

    saved = folder / "strategy"
    read = AutoModelForCausalLM.from_pretrained(saved / "3o" / model).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(saved / "plain" / model).state_dict()
    torch.testing.assert_close(read, plain, rtol=1e-5, atol=1e-6)
    assert {_weights(saved / way / model) for way in WAYS} == {_weights(saved / "0" / model)}


def test_a_checkpoint_in_the_middle_goes_on_bit_for_bit(folder: Path, ranks: Job) -> None:
    for way in WAYS:
        facts = _facts(folder, way)
        assert facts["loaded"]
        assert facts["states"] == {"consumed": 16}
        assert facts["went on"], way
        assert facts["nothing"] == [None, {}]
        assert json.loads((folder / "strategy" / way / "ckpt/half/metric.json").read_text())["metric_value"] == 0.5


def test_ranks_gather_and_reduce_what_they_log(folder: Path, ranks: Job) -> None:
    for facts in kits.facts(folder / "strategy" / "1o"):
        assert facts["gathered"] == [0.0, 1.0]
        assert facts["largest"] == 1.0


def test_muon_has_its_two_rates_and_the_same_losses_at_two_stages(folder: Path, ranks: Job) -> None:
    one, other = _facts(folder, "2m"), _facts(folder, "3m")
    assert one == other
    assert one["losses"] != _facts(folder, "0")["losses"]


@pytest.mark.parametrize(("program", "names"), [("sft", SFT), ("dpo", DPO)])
def test_programs_write_the_same_model_at_every_stage(folder: Path, ranks: Job, program: str, names: list[str]) -> None:
    assert {_weights(folder / program / name) for name in names} == {_weights(folder / program / names[0])}
    assert _weights(folder / program / names[0]) != _weights(folder / "pretrained")


def test_a_program_goes_on_where_another_was(folder: Path, ranks: Job) -> None:
    assert "consumed_samples: 16" in ranks.text
    assert _weights(folder / "resumed" / "3-offload") == _weights(folder / "sft" / "3-offload")


@pytest.mark.soak(
    "test_a_program_goes_on_where_another_was, in the same job, and in new ones "
    "tests/clients/test_hf_trainer.py::test_a_kill_inside_a_save_leaves_a_checkpoint_that_goes_on"
)
def test_a_new_job_goes_on_where_a_program_was(folder: Path, ranks: Job) -> None:
    job = kits.run_on_dsrun(folder, _sft("3-offload", "--ckpt.load_enable", out="resumed-anew"))
    assert "consumed_samples: 16" in job.text
    assert job.updates == [1]
    assert _weights(folder / "resumed-anew" / "3-offload") == _weights(folder / "sft" / "3-offload")
