"""Fine-tuning kits on dsrun: LLaMA-Factory's own workflow, ms-swift's calls, and open-instruct's sequence of GRPO.

What is looked at is what the engines counted, the losses, and the files. The oracle of LLaMA-Factory is its workflow
without DeepSpeed; the others are compared over the stages, and with themselves where they were taken up again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import clients, kits
from support.clients import Job

kits.need("llamafactory")
kits.need("swift")

pytestmark = pytest.mark.timeout(kits.DEADLINE_S)

#: Files of LLaMA-Factory, of a stage and an offload each.
FILES = ["z0", "z2_offload", "z3_offload"]
STAGES = [0, 2, 3]
RESUMED = ["again", "universal"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits")
    samples = [
        {"instruction": f"w{word} w{word + 1}", "input": "", "output": f"w{word + 2} w{word + 3}"} for word in range(24)
    ]
    (folder / "data").mkdir()
    (folder / "data" / "tiny.json").write_text(json.dumps(samples))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    clients.write_configs(folder, {name: kits.configs()[f"LLaMA-Factory {name}"] for name in FILES})
    kits.run_alone(folder, ["trl_tiny.py", "pretrained"], _factory("--batch", "4"))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Job:
    instruct = ["kit_open_instruct.py", "pretrained", "--stage"]
    resume = ["--resume", "instruct/3/state", "--out"]
    return kits.run_on_dsrun(
        folder,
        *([*instruct, str(stage), "--out", f"instruct/{stage}"] for stage in STAGES),
        [*instruct, "3", *resume, "instruct/again"],
        [*instruct, "2", *resume, "instruct/universal", "--universal"],
        _factory("--tools", "--deepspeed", *[f"{name}.json" for name in FILES]),
        ["kit_swift.py", "--stages", *map(str, STAGES), "--out", "swift"],
    )


def _factory(*more: str) -> list[str]:
    return ["kit_llamafactory.py", "--model", "pretrained", "--data", "data", "--out", "factory", *more]


def _series(facts: dict[str, Any], key: str) -> list[float]:
    return [entry[key] for entry in facts["log"] if "loss" in entry]


def test_engines_did_the_updates_that_each_kit_counts(folder: Path, ranks: Job) -> None:
    steps = [kits.facts(folder / "instruct" / name)[0]["steps"] for name in [*map(str, STAGES), *RESUMED]]
    assert steps == [*[[4, 4]] * len(STAGES), *[[4, 2]] * len(RESUMED)]
    # The records of a policy and of its value model, which step in turn, follow each other.
    trained = [count for count in ranks.updates if count]
    assert trained == [*[8] * len(STAGES), *[4] * len(RESUMED), *[3] * len(FILES), *[4] * (len(STAGES) + 1)]


def test_llama_factory_trains_by_its_own_files_as_it_does_without_deepspeed(folder: Path, ranks: Job) -> None:
    (plain,) = kits.facts(folder / "factory" / "none")
    first = kits.facts(folder / "factory" / FILES[0])[0]
    for key, tolerance in {"loss": 1e-5, "grad_norm": 1e-4, "learning_rate": 1e-12}.items():
        assert _series(first, key) == pytest.approx(_series(plain, key), rel=tolerance), key
        for name in FILES:
            assert _series(kits.facts(folder / "factory" / name)[0], key) == _series(first, key), (name, key)
    models = {(folder / "factory" / name / "output/model.safetensors").read_bytes() for name in FILES}
    assert len(models) == 1


def test_llama_factory_counts_flops_and_finds_experts(folder: Path, ranks: Job) -> None:
    # 16 tokens through two blocks and a head: each weight of a matrix once, and two products of attention a block.
    block = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 64 * 3
    macs = 16 * (2 * block + 32 * 99) + 2 * 2 * 16 * 16 * 32
    for facts in kits.facts(folder / "factory"):
        assert facts["macs"] == f"{macs / 1000:.2f} KMACs"
        assert facts["flops"] == f"{2 * macs / 1000:.2f} K"
        assert facts["params"] == "24.93 K"
        assert facts["leaves"] == ["MixtralSparseMoeBlock"]


def test_a_policy_beside_a_value_model_trains_alike_at_every_stage(folder: Path, ranks: Job) -> None:
    for rank in range(2):
        first, *others = [kits.facts(folder / "instruct" / str(stage))[rank] for stage in STAGES]
        assert all(facts == first for facts in others)
        assert first["mpu"] is None
        assert first["sequence"] == [0, 1]
        assert "sequence_parallel_size is 2" in first["two ranks a sequence"]
    models = {(folder / "instruct" / str(stage) / "model/model.safetensors").read_bytes() for stage in STAGES}
    assert len(models) == 1


@pytest.mark.parametrize("name", RESUMED)
def test_a_policy_goes_on_from_its_checkpoint_and_from_a_universal_one(folder: Path, ranks: Job, name: str) -> None:
    straight, again = (kits.facts(folder / "instruct" / each) for each in ("3", name))
    for rank in range(2):
        assert again[rank]["losses"] == straight[rank]["losses"][4:]
        for key in ("norms", "rates"):
            assert again[rank][key] == straight[rank][key][2:]
    assert again[0]["draws"] == straight[0]["draws"][2:], "what the script drew of its own, as the first rank kept it"
    model = (folder / "instruct" / "3" / "model/model.safetensors").read_bytes()
    assert (folder / "instruct" / name / "model/model.safetensors").read_bytes() == model


def test_states_that_are_moved_by_hand_stay_those_that_are_trained(folder: Path, ranks: Job) -> None:
    for facts in kits.facts(folder / "swift"):
        for stage in STAGES:
            moved = facts[str(stage)]
            assert moved["losses"] == facts["straight"]
            assert moved["model"] > 0
            assert moved["optimizer"] > 0
        assert "ds_tensor.data is set to other memory" in facts["3"]["elsewhere"]


def test_an_elastic_batch_divides_by_the_ranks_and_asks_for_universal_checkpoints(folder: Path, ranks: Job) -> None:
    # Batches up to 64 of micro batches of 2 or 4 that most numbers of ranks up to 8 divide: 48.
    for facts in kits.facts(folder / "swift"):
        assert facts["elastic"] == {"batch": 48, "config": {"load_universal": True}}
