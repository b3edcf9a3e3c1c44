"""Scripts in the manner of DeepSpeed's examples and of Megatron-DeepSpeed, which call it themselves, on dsrun.

The oracle is torch alone in one process, with the same batches.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from support import clients
from support.clients import Job

pytestmark = pytest.mark.timeout(3 * clients.DEADLINE_S)

#: As those of CIFAR's example: everything stands in the file.
CIFAR = {
    "train_batch_size": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "weight_decay": 0.01, "adam_w_mode": True}},
}
GPT = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
    "activation_checkpointing": {"partition_activations": False},
}
STAGES = (0, 1, 2, 3)
PRELOADED = ("torch._dynamo", "support.preloaded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for stage in STAGES:
        zero = {"zero_optimization": {"stage": stage}}
        clients.write_configs(folder, {f"cifar-{stage}": CIFAR | zero, f"gpt-{stage}": GPT | zero})
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path, job: Job) -> Path:
    """Torch alone; a `deepspeed` is there, and makes no engine."""
    (folder / "plain").mkdir()
    words = clients.several(
        ["cifar_net.py", "--plain", "cifar-0-facts.json", "--out", "plain/cifar.json"],
        ["gpt_loop.py", "--plain", "--out", "plain/gpt"],
        ["engines_loops.py", "--plain", "--out", "plain/engines.json"],
    )
    clients.run_words(folder, ["-m", "dsrun.as_deepspeed", *words])
    return folder / "plain"


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    runs: list[list[str | Path]] = []
    for stage in STAGES:
        config = ["--deepspeed", "--deepspeed_config", f"cifar-{stage}.json", "--moe"]
        runs.append(["cifar_net.py", *config, "--out", f"cifar-{stage}-facts.json"])
        runs.append(["gpt_loop.py", "--deepspeed_config", f"gpt-{stage}.json", "--out", f"gpt-{stage}"])
    return clients.run_on_dsrun(folder, *runs, ["engines_loops.py", "--out", "engines.json"], preload=PRELOADED)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_convolutional_network_trains_from_the_loader_of_the_engine(job: Job, folder: Path, plain: Path) -> None:
    oracle = read(plain / "cifar.json")["losses"]
    first = read(folder / "cifar-0-facts.json")
    for stage in STAGES:
        facts = read(folder / f"cifar-{stage}-facts.json")
        assert facts["updates"] == len(facts["losses"]) == 8
        assert [facts[key] for key in ("losses", "seen", "right")] == [
            first[key] for key in ("losses", "seen", "right")
        ]
    assert sorted(chain.from_iterable(first["seen"])) == list(range(32))
    assert first["losses"] == pytest.approx(oracle, abs=1e-5)


def test_the_branch_with_deepspeeds_experts_is_refused_with_its_reason(job: Job, folder: Path) -> None:
    refused = read(folder / "cifar-2-facts.json")["refused"]
    assert refused.startswith("deepspeed.moe.layer is not there: a model's own experts are trained as they are")


@pytest.mark.parametrize("stage", STAGES)
def test_a_megatron_style_loop_has_the_losses_and_norms_of_torch(
    job: Job, folder: Path, plain: Path, stage: int
) -> None:
    oracle, facts = read(plain / "gpt" / "facts.json"), read(folder / f"gpt-{stage}" / "facts.json")
    assert facts["losses"] == pytest.approx(oracle["losses"], abs=1e-5)
    assert facts["norms"] == pytest.approx(oracle["norms"], abs=1e-5)
    assert facts["rates"] == [[pytest.approx(0.01 / 3)] * 2] * 2
    assert facts["losses"] == read(folder / "gpt-0" / "facts.json")["losses"]
    assert facts["configured"]
    assert facts["tracker"]
    assert facts["timed"]


@pytest.mark.parametrize("stage", STAGES)
def test_another_engine_goes_on_from_its_checkpoint_as_without_a_break(job: Job, folder: Path, stage: int) -> None:
    facts = read(folder / f"gpt-{stage}" / "facts.json")
    assert facts["again"] == facts["rest"]
    assert facts["state"] == {"iteration": 4, "consumed": [4, "samples"]}
    assert facts["updates"] == [4, 4]


@pytest.mark.parametrize("loop", ["gan", "policy"])
def test_several_engines_of_other_stages_train_in_one_loop(job: Job, folder: Path, plain: Path, loop: str) -> None:
    facts, oracle = read(folder / "engines.json")[loop], read(plain / "engines.json")[loop]
    assert facts["losses"] == pytest.approx(oracle["losses"], abs=1e-5)
    assert facts["updates"] == oracle["updates"] == [4, 4]
