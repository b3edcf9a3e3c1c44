"""`dsrun plan` from its words to what it prints, and the check that `dsrun run` makes before it starts anything."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.load import load
from dsrun.contract.environment import digest_of
from dsrun.estimate.model.units import from_count
from support.cli import Result, invoke
from support.core_speed import program_core_seconds

CONFIGS = Path(__file__).parents[3] / "configs"

REPORT = """\
model     7B: 7B parameters, 32 layers of width 4096
on        8 x H100-80G
settings  ZeRO stage 3, 16-bit with fp32 masters, nothing recomputed
batch     1 x 2,048 tokens a rank, 1 micro step: 16,384 tokens a step
state     17.4 GB a rank before activations; 14.0 GB as the ZeRO paper counts it
verdict   fits

GPU of a rank                  GiB
  parameters                  1.63  #
  gather slots                0.78  #
  gradient buckets            0.78  #
  gradient sums fp32          3.26  #
  master weights              3.26  #
  optimizer states            6.52  ##
  activations                 9.38  ###
  logits and loss             0.61  #
  allocator slack             0.79  #
  CUDA context                0.50  #
  NCCL buffers                0.50  #
  total                      28.01  [########................] 35 % of 79.6

CPU of a rank                  GiB
  Python, torch and CUDA      1.50  ########################
  total                       1.50

host memory of 8 ranks: 12.0 GiB of unknown, see `--host-memory`
from the first checkpoint on: 78.2 GiB more, for its copy

attention of a block             kept    forward   backward  MiB
  flash                          64.2       16.2       80.2  <- taken
  cudnn                          64.2       16.2       80.2
  efficient                      64.2       16.2       80.2
  math                          608.0    1,360.1    1,056.0
  flash is taken: fused; math would hold the 2,048 x 2,048 matrix

one step of a rank                        amount  at least
  compute                             88.3 TFLOP  112 ms  <- bottleneck
  optimizer                             24.4 GiB  8.71 ms
  data                                  33.7 GiB  100 ms
a step: at least 120 ms, at most 136,249 tokens/s and 729 TFLOP/s a GPU (74% of
its peak); bound by compute

assumed
  - the number says no more than the size: layers as in Llama 2 7B (32 of width
    4096)
  - speeds: 80% of its FLOP/s, 90% of its memory's and 80% of links' bandwidth
    in: NVIDIA H100 datasheet (2022, dense); host as in DGX H100: 8 NDR links,
    16 channels of DDR5-4800 for 8 GPUs
"""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


def planned(*args: str) -> str:
    result = invoke("plan", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*args: str) -> str:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def as_json(*args: str) -> Any:
    return json.loads(planned(*args, "--json"))


def test_the_report_reads_as_reviewed() -> None:
    config = str(CONFIGS / "bf16-zero3.json")
    assert planned("7B", "--config", config, "--gpus", "8xH100-80G", "--seq", "2048", "--micro", "1") == REPORT


@pytest.mark.parametrize(
    "words",
    [
        ["405B", "--gpus", "128xH100-80G"],
        ["70B", "--gpus", "8xH100", "--config", str(CONFIGS / "finetune-70b-8x80gb.json")],
        ["7B", "--gpus", "8xA100-40G", "--what-if", "--host-memory", "1T", "--nvme", "7T"],
        ["10M", "-n", "2", "--seq", "128"],
    ],
    ids=["405B", "offload", "what-if", "cpu"],
)
def test_no_line_is_wider_than_80_columns(words: list[str]) -> None:
    assert max(len(line) for line in planned(*words).splitlines()) <= 80


def test_json_has_the_same_figures_and_a_schema_version() -> None:
    plan = as_json("7B", "--gpus", "8xH100-80G", "--config", str(CONFIGS / "bf16-zero3.json"), "--micro", "1")
    assert plan["schema_version"] == 1
    assert (plan["fits"], plan["runs"], plan["machine"]["ranks"]) == (True, True, 8)
    gpu = next(tier for tier in plan["tiers"] if tier["name"] == "GPU")
    assert gpu["bytes"] == sum(line["bytes"] for line in gpu["lines"])
    assert plan["step"]["floor_s"] == pytest.approx(
        plan["step"]["floors_s"]["compute"] + plan["step"]["floors_s"]["optimizer"]
    )


def test_attention_is_told_by_kernel_with_what_is_in_the_way(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, **sizes}))
    told = as_json("config.json", "--gpus", "V100-32G", "--seq", "2048")["attention"]
    assert told["kernel"] == "math"
    assert told["reason"] == "no fused kernel can: fewer heads of keys than of queries"
    assert [kernel["name"] for kernel in told["kernels"]] == ["flash", "cudnn", "efficient", "math"]
    assert told["kernels"][0]["obstacle"] == "a GPU older than Ampere"
    assert told["kernels"][3]["obstacle"] is None
    assert told["kernels"][3]["kept_bytes"] == 4 * 32 * 2048 * (2048 + 3 * 128)
    text = planned("10M", "-n", "2", "--seq", "128")
    assert f"  {'cudnn':<24}cannot: it needs CUDA\n" in text
    assert "  flash is taken: fused; math would hold the 128 x 128 matrix\n" in text


def test_without_a_config_the_fastest_stage_that_fits_is_planned() -> None:
    plan = as_json("7B", "--gpus", "8xH100-80G", "--seq", "2048")
    assert plan["settings"]["stage"] == 1
    assert "no `--config`: bf16 with AdamW, at stage 1 (the fastest that fits)" in plan["assumed"]


def test_what_does_not_fit_says_by_how_much() -> None:
    said = planned("70B", "--gpus", "8xA100-40G", "--seq", "2048", "--config", str(CONFIGS / "bf16-zero3.json"))
    assert re.search(r"verdict   does not fit: GPU needs [0-9.]+ GiB of 40\.0 GiB a rank\n", said)


def test_what_if_as_json_says_which_table_a_row_is_of() -> None:
    told = json.loads(planned("7B", "--gpus", "8xA100-80G", "--host-memory", "1T", "--what-if", "--json"))
    tables = [row["table"] for row in told]
    assert tables == sorted(tables, reverse=True)
    assert tables.count("stages") == 12
    layouts = [row["settings"] for row in told if row["table"] == "layouts"]
    assert {(row["tensor_parallel"], row["stages"]) for row in layouts} >= {(1, 1), (2, 1), (1, 2), (2, 4), (8, 1)}
    assert {row["policy"] for row in layouts} == {"every_block", "selective"}


def test_what_if_marks_what_fits_and_what_this_version_cannot_run() -> None:
    lines = planned("7B", "--gpus", "8xA100-80G", "--seq", "2048", "--host-memory", "1T", "--what-if").splitlines()
    rows = [line for line in lines if line[:1].isdigit()]
    assert len(rows) == 12
    assert re.fullmatch(r"0     none .* no", rows[0])
    assert re.fullmatch(r"1     none .* yes", rows[1])
    assert rows[2].startswith("1     optimizer to cpu")
    planned_rows = [row for row in rows if row.endswith("*")]
    assert all("nvme" in row for row in planned_rows)
    assert ("* planned: this version cannot run it" in lines) == bool(planned_rows)


def pipelined(tmp_path: Path, **section: Any) -> str:
    path = tmp_path / "pipeline.json"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 4, **section},
    }
    path.write_text(json.dumps(config))
    return str(path)


def test_pipeline_stages_are_told_with_what_they_hold_send_and_wait(tmp_path: Path) -> None:
    """Inner stages send 2 x 8 tensors of 2,048 x 4,096 values in 2 bytes, 256 MiB; ranks wait 3/11 and more."""
    words = ["7B", "--gpus", "8xA100-80G", "--seq", "2048", "--config", pipelined(tmp_path)]
    lines = planned(*words).splitlines()
    assert lines[2] == "settings  ZeRO stage 1, 16-bit with fp32 masters, pipeline 4, nothing recomputed"
    table = lines[7:12]
    assert table[0].split() == ["stage", "blocks", "cost", "params", "live", "sends", "memory"]
    assert table[1].startswith("0      embedding, 8              24.5%    1.82B      4  128.0 MiB")
    assert table[1].endswith("  <-")
    assert table[2].startswith("1      8                         24.5%    1.68B      3  256.0 MiB")
    assert table[4].startswith("3      8, head                   26.4%    1.82B      1  128.0 MiB")
    said = " ".join(lines[12:19])
    assert "the costliest stage computes 5.7% more than the mean; the head takes as long as 0.62 blocks" in said
    assert "1f1b, 8 micro batches: ranks wait 29.8% of a step; 27.3% if all chunks took as long" in said
    assert "with M = 8 and P = 4 is 84.2%: the efficiency of interleaved 1F1B with v = P/2 = 2 chunks a rank" in said
    told = as_json(*words)["pipeline"]
    assert [stage["blocks"] for stage in told["stages"]] == [[8], [8], [8], [8]]
    assert [stage["live_micro_batches"] for stage in told["stages"]] == [4, 3, 2, 1]
    assert [stage["sent_bytes"] for stage in told["stages"]] == [n * 8 * 2048 * 4096 * 2 for n in (1, 2, 2, 1)]
    assert (told["schedule"], told["micro_batches"], told["fullest"]) == ("1f1b", 8, 0)
    assert told["bubble_formula"] == pytest.approx(3 / 11)
    assert told["efficiency_interleaved"] == pytest.approx(32 / 38)
    assert as_json("10M", "-n", "2", "--seq", "128")["pipeline"] is None


def test_stages_that_a_config_leaves_open_are_planned_and_that_is_said(tmp_path: Path) -> None:
    words = ["7B", "--gpus", "4x1xA100-80G", "--seq", "2048", "--speed", "network=0.5", "--config"]
    told = as_json(*words, pipelined(tmp_path, stages="auto"))
    stages = len(told["pipeline"]["stages"])
    assert stages > 1
    assert [one for one in told["assumed"] if one.startswith("`pipeline.stages`")] == [
        f'`pipeline.stages` "auto" is {stages} (of 1, 2, 4): the fastest of those that fit, for 7B with 2,048 '
        "tokens a sample on 4 x A100-80G on 4 hosts; a script's PipelineModule keeps its own number of stages"
    ]
    written = as_json(*words, pipelined(tmp_path, stages=stages))
    assert told["step"] == written["step"]
    assert not [one for one in written["assumed"] if "pipeline.stages" in one]
    drawn = invoke("plan", *words, pipelined(tmp_path, stages="auto"), "--schedule", "-")
    assert drawn.exit_code == 0


def test_a_batch_that_no_number_of_stages_takes_is_refused_with_what_was_counted(tmp_path: Path) -> None:
    path = pipelined(tmp_path, stages="auto")
    Path(path).write_text(json.dumps({**json.loads(Path(path).read_text()), "train_batch_size": 17}))
    refused = invoke("plan", "7B", "--gpus", "8xA100-80G", "--seq", "2048", "--config", path)
    assert refused.exit_code == 2
    assert f'error: {path}: `pipeline.stages` "auto" counted as 1\nhint: write numbers in place' in refused.stderr


def test_ranks_that_share_a_layer_are_planned_where_a_config_leaves_them_open(tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    settings = json.loads((CONFIGS / "bf16-zero0.json").read_text())
    path.write_text(json.dumps({**settings, "tensor_parallel": {"autotp_size": "auto"}}))
    words = ["13B", "--gpus", "8xA100-80G", "--seq", "2048", "--config", str(path)]
    told = as_json(*words)
    (note,) = [one for one in told["assumed"] if one.startswith("`tensor_parallel.autotp_size`")]
    size = int(re.findall(r'"auto" is (\d) \(of 1, 2, 4, 8\): the fastest of those that fit', note)[0])
    assert size > 1
    path.write_text(json.dumps({**settings, "tensor_parallel": {"autotp_size": size}}))
    assert told["step"] == as_json(*words)["step"]
    path.write_text(json.dumps({**settings, "tensor_parallel": {"autotp_size": "auto"}}))
    assert as_json(*words, "--axes", "d2")["settings"]["tensor_parallel"] == 4, "two data ranks of eight"
    assert as_json(*words, "--axes", "t8")["assumed"] == as_json(*words[:-1], str(path), "--axes", "t8")["assumed"]


def test_axes_that_do_not_divide_are_refused_where_they_were_said() -> None:
    words = ["plan", "7B", "--gpus", "4x8xH100-80G", "--axes", "t3"]
    said = "`tensor_parallel.autotp_size` is 3; 32 ranks do not divide by tensor parallel 3\nhint: use a multiple of 3"
    assert invoke(*words).stderr.startswith(f"error: `--axes t3`: {said}")
    config = str(CONFIGS / "bf16-zero0.json")
    assert invoke(*words, "--config", config).stderr.startswith(f"error: {config} with `--axes t3`: {said}")


def test_a_stage_is_chosen_for_axes_that_are_planned_too() -> None:
    told = as_json("70B", "--gpus", "4x8xH100-80G", "--axes", "t8u4")
    assert (told["runs"], told["fits"]) == (False, True)
    stage = told["settings"]["stage"]
    assert f"no `--config`: bf16 with AdamW, at stage {stage} (the fastest that fits)" in told["assumed"]


def test_fit_asks_for_a_place_on_nvme_where_nothing_else_fits(tmp_path: Path) -> None:
    words = ["30B", "--gpus", "RTX4090-24G", "--seq", "1024", "--host-memory", "160G", "--nvme", "4T", "--fit"]
    refused = invoke("plan", *words)
    assert refused.exit_code == 2
    assert "error: what fits offloads to NVMe, and the config does not say where\nhint: add " in refused.stderr
    place = {"nvme_path": str(tmp_path)}
    path = tmp_path / "nvme.json"
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero})
    )
    fitted = invoke("plan", *words, "--config", str(path))
    assert fitted.exit_code == 0
    assert json.loads(fitted.stdout)["zero_optimization"]["offload_param"] == {**place, "device": "nvme"}


def test_fit_writes_numbers_where_a_config_leaves_sizes_open(tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    settings = json.loads((CONFIGS / "bf16-zero0.json").read_text())
    path.write_text(
        json.dumps({**settings, "tensor_parallel": {"autotp_size": "auto"}, "pipeline": {"stages": "auto"}})
    )
    result = invoke("plan", "70B", "--gpus", "8xH100-80G", "--host-memory", "2T", "--config", str(path), "--fit")
    assert result.exit_code == 0
    fitted = json.loads(result.stdout)
    assert '"auto"' not in json.dumps([fitted.get("tensor_parallel"), fitted.get("pipeline")])
    load(fitted, world_size=8)


def test_a_model_with_fewer_blocks_than_chunks_is_refused(tmp_path: Path) -> None:
    config = pipelined(tmp_path, virtual_stages=64, schedule="breadth_first")
    result = invoke("plan", "7B", "--gpus", "8xA100-80G", "--config", config)
    assert result.exit_code == 2
    assert "the model has 32 blocks, and each chunk needs one" in result.stderr


def test_the_schedule_is_drawn_into_a_file_or_as_text(tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    words = ["plan", "7B", "--gpus", "8xA100-80G", "--seq", "128", "--config", pipelined(tmp_path)]
    result = invoke(*words, "--schedule", str(picture))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"dsrun: {picture}: 1f1b, 4 stages, 8 micro batches\n"
    assert picture.read_text().startswith("<svg")
    text = invoke(*words, "--schedule", "-")
    assert text.exit_code == 0
    assert len(text.stdout.splitlines()) >= 4


def test_a_schedule_of_too_many_micro_batches_to_read_is_refused_with_a_number_that_can_be_drawn(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "schedule.svg"
    words = ["plan", "7B", "--gpus", "8xA100-80G", "--seq", "128", "--config", pipelined(tmp_path)]
    for path in (str(picture), "-"):
        long = invoke(*words, "--axes", "m9999999", "--schedule", path)
        assert (long.exit_code, long.stdout) == (2, "")
        assert long.stderr.splitlines() == [
            f"error: `--schedule {path}` draws at most 1248 micro batches of 1f1b on 4 stages; an update has 9999999",
            "hint: draw fewer, for they repeat: `--axes m16`, beside the sizes you give",
        ]
    assert not picture.exists()
    assert invoke(*words, "--axes", "m1249", "--schedule", str(picture)).exit_code == 2
    for sizes in ("m16", "m1248"):
        assert invoke(*words, "--axes", sizes, "--schedule", str(picture)).exit_code == 0
    assert picture.stat().st_size < 2_000_000


def test_a_schedule_is_drawn_of_a_pipeline_alone_and_by_itself(tmp_path: Path) -> None:
    words = ["plan", "7B", "--gpus", "8xA100-80G", "--seq", "128"]
    one = invoke(*words, "--schedule", "-")
    assert one.exit_code == 2
    assert "`--schedule` draws a pipeline's schedule, and the config has one stage" in one.stderr
    config = pipelined(tmp_path)
    both = invoke(*words, "--config", config, "--schedule", "-", "--json")
    assert both.exit_code == 2
    assert "`--schedule` goes with none of `--fit`, `--what-if` and `--json`" in both.stderr
    named = invoke(*words, "--config", config, "--schedule", str(tmp_path / "picture.png"))
    assert named.exit_code == 2
    assert "expected a name that ends in .svg, or `-`" in named.stderr


def test_fit_proposes_a_pipeline_where_the_network_is_slow(tmp_path: Path) -> None:
    words = ["7B", "--gpus", "4x1xA100-80G", "--seq", "2048", "--speed", "network=0.5", "--config"]
    result = invoke("plan", *words, pipelined(tmp_path, stages="auto"), "--fit")
    assert result.exit_code == 0
    fitted = json.loads(result.stdout)
    assert fitted["pipeline"]["stages"] > 1
    assert fitted["zero_optimization"]["stage"] in (0, 1)
    assert f"`pipeline.stages` {fitted['pipeline']['stages']}" in result.stderr
    assert "the script trains with `engine.train_batch`" in result.stderr
    path = tmp_path / "fitted.json"
    path.write_text(result.stdout)
    batch = load(path, world_size=4).batch
    assert batch is not None
    assert batch.train_batch_size == 8 * 4


def test_fit_prints_a_config_that_loads_and_fits(tmp_path: Path) -> None:
    source = str(CONFIGS / "bf16-zero0.json")
    result = invoke("plan", "7B", "--gpus", "8xA100-80G", "--seq", "2048", "--config", source, "--fit")
    assert result.exit_code == 0
    fitted = tmp_path / "fitted.json"
    fitted.write_text(result.stdout)
    before, after = load(source, world_size=8), load(fitted, world_size=8)
    assert before.batch is not None
    assert after.batch is not None
    assert after.batch.train_batch_size == before.batch.train_batch_size
    assert after.zero_optimization.stage in (1, 2)
    assert "`zero_optimization.stage`" in result.stderr
    assert as_json("7B", "--gpus", "8xA100-80G", "--seq", "2048", "--config", str(fitted))["fits"]


def test_fit_where_nothing_fits_says_what_needs_less() -> None:
    assert refused("plan", "70B", "--gpus", "2xRTX4090", "--fit") == (
        "error: no layout, stage, recomputation, offload and micro batch fits\n"
        "hint: `--what-if` shows by how much; more ranks, `--host-memory` or a shorter `--seq` help\n"
    )


def test_fit_refuses_a_config_with_keys_that_are_not_built(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 8}')
    said = refused("plan", "405B", "--gpus", "128xH100", "--config", str(config), "--fit")
    assert "`sequence_parallel_size`" in said
    assert "which this version does not build yet\n" in said


def test_fit_takes_offloading_out(tmp_path: Path) -> None:
    config = str(CONFIGS / "offload-optimizer-zero2.json")
    result = invoke("plan", "1B", "--gpus", "8xA100-80G", "--config", config, "--fit")
    (tmp_path / "fitted.json").write_text(result.stdout)
    assert load(tmp_path / "fitted.json", world_size=8).zero_optimization.offload_optimizer.device == "none"


def test_a_config_json_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            }
        )
    )
    for words in (str(folder), str(folder / "config.json")):
        plan = as_json(words, "--gpus", "8xH100")
        assert plan["model"] == {
            "label": "Llama-3-8B",
            "parameters": 8_030_261_248,
            "trained_parameters": 8_030_261_248,
        }


def test_a_callable_is_built_on_the_meta_device(tmp_path: Path) -> None:
    (tmp_path / "mymodel.py").write_text(
        "import torch\n"
        "def make():\n"
        "    assert torch.get_default_device().type == 'meta'\n"
        "    return torch.nn.Sequential(torch.nn.Linear(100_000, 100_000), torch.nn.ReLU())\n"
    )
    plan = as_json("mymodel:make", "--gpus", "8xH100")
    assert plan["model"]["label"] == "mymodel:make"
    assert plan["model"]["parameters"] == 100_000 * 100_001
    assert "activations" in [line["name"] for line in plan["tiers"][0]["lines"] if line["bytes"] is None]


def test_a_callable_that_cannot_be_built_says_why() -> None:
    assert refused("plan", "no_such_module:make", "--gpus", "H100") == (
        "error: `no_such_module:make` cannot be built on the meta device: ModuleNotFoundError: "
        "No module named 'no_such_module'\n"
        "hint: expected a function or class without arguments that returns a torch.nn.Module\n"
    )


def write_run(
    state: Path,
    script: Path,
    *,
    job: str = "20261121-0700-aaaa",
    count: str = "1B",
    words: Sequence[str] = (),
    has_shape: bool = True,
) -> None:
    """Leaves what a run of `script` leaves."""
    from dsrun.estimate.model.units import parse_count

    numel = parse_count(count)
    assert numel is not None
    size = from_count(numel)
    folder = state / "dsrun" / "jobs" / job
    folder.mkdir(parents=True)
    record = {
        "event": "start",
        "time": time.time() + 10,
        "script": os.path.realpath(script),
        "arguments": digest_of(list(words)),
        "model": (size if has_shape else replace(size, architecture=None)).to_json(),
    }
    (folder / "records.jsonl").write_text(json.dumps(record) + '\n{"event": "step"}\n')


def test_a_script_that_never_ran_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert refused("plan", "train.py", "--gpus", "H100") == (
        "error: MODEL train.py: a script says nothing about its model before it runs, and no run of it is on record\n"
        "hint: add `--model 7B` (or a config.json, or `module:callable`), or run it once with `dsrun`\n"
    )


def test_a_script_is_planned_by_its_last_run(tmp_path: Path, state_folder: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    write_run(state_folder, script, job="20261121-0700-aaaa", count="1B")
    write_run(state_folder, script, job="20261122-0700-aaaa", count="2B")
    write_run(state_folder, tmp_path / "other.py", job="20261123-0700-aaaa", count="3B")
    plan = as_json("train.py", "--gpus", "H100")
    assert plan["model"]["parameters"] == 2 * 10**9
    assert "the model is that of the script's last run, job 20261122-0700-aaaa" in plan["assumed"]


def test_a_script_may_be_given_its_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert as_json("train.py", "--model", "350M", "--gpus", "H100")["model"]["parameters"] == 350 * 10**6


def test_a_hostfile_says_how_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    machine = as_json("1B", "--hostfile", "hosts", "--gpus", "A100-80G")["machine"]
    assert (machine["ranks"], machine["ranks_per_host"], machine["gpu"]) == (8, 4, "A100-80G")


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 7}}')
    said = refused(
        *("plan", "llama.json", "--gpus", "8xH101", "--config", "bad.json"),
        *("--speed", "wind=3", "--host-memory", "lots"),
    )
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [
        "error: llama.json: cannot be read: no such file or directory",
        "error: `--speed` is `wind=3`; expected NAME=VALUE with a value above 0",
        "error: `--host-memory` is `lots`; expected a size like `512G` or `2T`",
        "error: GPU `H101` is not in the catalogue",
        "error: bad.json:1:56: `zero_optimization.stage` is 7; expected 0, 1, 2 or 3",
    ]


@pytest.mark.parametrize("model", ["llama", "7", "0B", "", "a:b:c", "7B x"])
def test_text_that_names_no_model_lists_the_forms(model: str) -> None:
    said = refused("plan", model, "--gpus", "H100")
    assert said.startswith(f"error: MODEL `{model}` ")
    assert "expected a count like `7B`" in said


@pytest.mark.depends_on_speed("1 s of a core")
def test_405b_on_128_gpus_is_planned_within_a_second_and_without_torch() -> None:
    code = (
        "import sys\n"
        "from dsrun.launcher.cli import main\n"
        "try:\n"
        "    main(['plan', '405B', '--gpus', '128xH100-80G'])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'rich', 'fabric'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    assert program_core_seconds([sys.executable, "-c", code]) < 1.0


def dry_run(*args: str) -> Result:
    return invoke("run", "--backend", "gloo", "--dry-run", *args)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_run_that_cannot_fit_is_refused_with_what_fits(script: Path) -> None:
    result = dry_run("-n", "2", "--model", "100B", "--config", str(CONFIGS / "zero0.json"), str(script))
    assert result.exit_code == 2
    assert re.search(
        r"error: \S+zero0\.json: 100B cannot fit at stage 0: 1\.8 TiB of model state a rank, 3\.6 TiB for 2 ranks; "
        r"[0-9.]+ [GT]iB is what this machine has free\nhint: .*; `--no-plan` starts it anyway\n",
        result.stderr,
    )


def test_the_last_run_of_the_same_script_and_words_is_proof_enough(script: Path, state_folder: Path) -> None:
    write_run(state_folder, script, count="100B", words=["--depth", "3"])
    config = str(CONFIGS / "zero0.json")
    assert dry_run("--config", config, str(script), "--depth", "3").exit_code == 2
    assert dry_run("--config", config, str(script), "--depth", "4").exit_code == 0
    assert dry_run("--no-plan", "--config", config, str(script), "--depth", "3").exit_code == 0
    os.utime(script, (time.time() + 100, time.time() + 100))
    assert dry_run("--config", config, str(script), "--depth", "3").exit_code == 0


def test_a_run_of_which_nothing_is_known_is_not_held_up(script: Path) -> None:
    result = dry_run("--config", str(CONFIGS / "zero0.json"), str(script))
    assert (result.exit_code, result.stderr) == (0, "")


def leaves_open(folder: Path, **sections: Any) -> str:
    """A config that leaves sizes of axes to a plan."""
    path = folder / "open.json"
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **sections}
    path.write_text(json.dumps(settings))
    return str(path)


TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": "auto"}}
STAGES: dict[str, Any] = {"pipeline": {"stages": "auto"}}


def test_a_launch_plans_the_sizes_that_its_config_leaves_open(script: Path, state_folder: Path) -> None:
    result = dry_run("-n", "2", "--model", "350M", "--config", leaves_open(script.parent, **TENSOR), str(script))
    assert result.exit_code == 0
    (size,) = re.findall(r"^dsrun: `tensor_parallel\.autotp_size` \"auto\" is (\d) \(of 1, 2\): ", result.stderr, re.M)
    assert "for 350M with 4,096 tokens a sample on 2 ranks on the CPU of this machine" in result.stderr
    assert f"DSRUN_PLANNED_AXES=tensor={size}" in result.stdout
    assert "`" not in dry_run("-n", "2", "--model", "350M", "--config", leaves_open(script.parent), str(script)).stderr
    both = leaves_open(script.parent, **TENSOR, **STAGES)
    write_run(state_folder, script, count="350M", words=["--depth", "3"])
    known = dry_run("-n", "2", "--config", both, str(script), "--depth", "3")
    assert known.exit_code == 0
    assert re.search(r"DSRUN_PLANNED_AXES=pipe=\d,tensor=\d", known.stdout)
    assert "a script's PipelineModule keeps its own number of stages" in known.stderr


def test_layers_whose_shape_is_not_known_are_not_cut_in_silence(script: Path, state_folder: Path) -> None:
    write_run(state_folder, script, count="1M", has_shape=False)
    refused = dry_run("-n", "2", "--config", leaves_open(script.parent, **TENSOR), str(script))
    assert refused.exit_code == 2
    assert (
        '"auto", and the shape of the layers of 1M is not known\nhint: add `--model 7B` or a config' in refused.stderr
    )
    left = dry_run("-n", "2", "--config", leaves_open(script.parent, **STAGES), str(script))
    assert (left.exit_code, left.stderr) == (0, "")
    told = as_json(str(script), "--gpus", "2xA100-80G", "--config", leaves_open(script.parent, **TENSOR))
    (note,) = [one for one in told["assumed"] if one.startswith("`tensor_parallel.autotp_size`")]
    assert '"auto" is 1 (of 1): the shape of its layers is not known, for 1M with ' in note


def test_what_is_planned_is_asked_whether_it_fits(script: Path) -> None:
    result = dry_run("-n", "2", "--model", "100B", "--config", leaves_open(script.parent, **TENSOR), str(script))
    assert result.exit_code == 2
    assert "100B cannot fit at stage 0" in result.stderr


def test_ranks_that_share_a_layer_are_not_guessed(script: Path) -> None:
    config = leaves_open(script.parent, **TENSOR)
    unknown = dry_run("-n", "2", "--config", config, str(script))
    assert unknown.exit_code == 2
    assert unknown.stderr == (
        f'error: {config}: `tensor_parallel.autotp_size` is "auto", and the model is not known before the script runs\n'
        "hint: add `--model 7B`, a config.json or `module:callable`, or write the number that `dsrun plan MODEL --fit` "
        "prints; 1 cuts no layer\n"
    )
    unplanned = dry_run("-n", "2", "--no-plan", "--model", "350M", "--config", config, str(script))
    assert unplanned.exit_code == 2
    assert "`--no-plan` makes no plan\nhint: leave `--no-plan` out, or write the number" in unplanned.stderr


def test_other_hosts_are_taken_to_be_like_this_one(script: Path) -> None:
    hosts = script.parent / "hosts"
    hosts.write_text("nodea slots=2\nnodeb slots=2\n")
    words = ("--dry-run", "-H", str(hosts), "--model", "350M", "--config", leaves_open(script.parent, **TENSOR))
    planned = invoke("run", "--backend", "gloo", *words, str(script))
    assert planned.exit_code == 0
    assert '"auto" is ' in planned.stderr
    assert "(of 1, 2): " in planned.stderr, "both ranks of a host, and no more while that fits"
    assert "for 350M with 4,096 tokens a sample on 4 ranks on 2 hosts" in planned.stderr
    unseen = invoke("run", *words, str(script))
    assert unseen.exit_code == 2
    assert "this machine has no GPU that tells of those of the other hosts\nhint: start it on one" in unseen.stderr


def test_nodes_that_start_themselves_make_no_plan(script: Path) -> None:
    static = ("--nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "29999")
    config = leaves_open(script.parent, **TENSOR)
    result = dry_run(*static, "-n", "2", "--model", "350M", "--config", config, str(script))
    assert result.exit_code == 2
    assert "every node starts dsrun by itself: their plans could differ" in result.stderr


def test_stages_are_left_to_a_script_of_which_nothing_is_known(script: Path) -> None:
    result = dry_run("-n", "2", "--config", leaves_open(script.parent, **STAGES), str(script))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "DSRUN_PLANNED_AXES" not in result.stdout


def test_a_batch_that_takes_no_sizes_is_refused_before_a_launch(script: Path) -> None:
    config = leaves_open(script.parent, **TENSOR, train_batch_size=3, train_micro_batch_size_per_gpu=2)
    result = dry_run("-n", "2", "--model", "350M", "--config", config, str(script))
    assert result.exit_code == 2
    assert "`train_batch_size` 3" in result.stderr


def test_a_run_that_fits_is_not_held_up(script: Path) -> None:
    result = dry_run("--model", "1M", "--config", str(CONFIGS / "zero3.json"), str(script))
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize("text", ["[" * 10_000, '{"a":' * 10_000])
def test_a_config_json_ten_thousand_levels_deep_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(text)
    assert "nested more than 64 deep" in refused("plan", str(path), "--gpus", "H100")


def test_a_config_json_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    assert refused("plan", str(path), "--gpus", "H100").startswith(f"error: {path} is a named pipe")


def test_a_number_of_five_thousand_digits_is_no_count() -> None:
    assert "nothing that can be planned" in refused("plan", "9" * 5_000 + "T", "--gpus", "H100")


def test_a_kind_of_model_that_is_not_known_is_said_to_be_assumed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", **sizes}))
    assert "`model_type` is `opt`" in as_json(str(tmp_path), "--gpus", "H100")["assumed"][0]


def test_a_network_of_unknown_speed_is_told_where_a_choice_was_made() -> None:
    words = ["plan", "7B", "--gpus", "4x8xL40S"]
    fitted = invoke(*words, "--fit")
    assert re.search(
        r"a step of at least [0-9.]+s by the paths whose speed is known, "
        r"unknown speeds taken for `network` 1\.25 GB/s;",
        fitted.stderr,
    )
    told = invoke(*words, "--fit", "--speed", "network=1.25")
    assert "unknown" not in told.stderr
    assert told.stdout == fitted.stdout
    table = invoke(*words, "--what-if").stdout
    assert (
        "layouts at stage 3 (2 in a pipeline), the best first, unknown speeds taken for\n`network` 1.25 GB/s\n" in table
    )


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    taken = invoke("plan", "7B", "--gpus", "3xA100-80G", "--axes", "t3")
    assert taken.exit_code == 0, "32 heads of keys are dealt to three ranks, unevenly"
    refused = invoke("plan", "70B", "--gpus", "3x4xA100-80G", "--axes", "t12")
    assert refused.exit_code == 2
    assert "`tensor_parallel.autotp_size` 12: the model has 64 heads of queries and 8 of keys" in refused.stderr


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
            ["--micro", "4"],
        ),
        ({}, ["--micro", "2"]),
        ({}, ["--axes", "c2"]),
    ],
    ids=["micro", "micro-alone", "ring"],
)
def test_sizes_left_open_are_planned_where_an_option_says_the_samples_of_a_rank(
    batch: dict[str, int], words: list[str], tmp_path: Path
) -> None:
    """A config that by itself says no batch, or one for which no sizes would do, is planned with what options say."""
    path = tmp_path / "auto.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": "auto"}, **batch}))
    told = as_json("350M", "--gpus", "4xA100-80G", "--seq", "512", "--config", str(path), *words)
    (note,) = [one for one in told["assumed"] if one.startswith("`tensor_parallel.autotp_size`")]
    assert f'"auto" is {told["settings"]["tensor_parallel"]} (of 1, 2, 4): the fastest of those that fit' in note


def test_sizes_are_planned_for_a_config_that_says_no_batch(tmp_path: Path) -> None:
    """One sample is assumed, as for numbers in their place; chunks in turn, which that takes not, are left out."""
    path = tmp_path / "auto.json"
    chunks = {"stages": "auto", "schedule": "interleaved", "virtual_stages": 2}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "tensor_parallel": {"autotp_size": "auto"}}))
    told = as_json("350M", "--gpus", "4xA100-80G", "--seq", "512", "--config", str(path))
    assert any(note.startswith('`tensor_parallel.autotp_size` "auto" is ') for note in told["assumed"])
    path.write_text(json.dumps({"bf16": {"enabled": True}, "pipeline": chunks}))
    told = as_json("350M", "--gpus", "4xA100-80G", "--seq", "512", "--config", str(path))
    assert any(note.startswith('`pipeline.stages` "auto" is 1 (of 1, 2, 4)') for note in told["assumed"])


def test_fit_divides_the_samples_of_an_update_by_given_ranks_and_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "train_batch_size": 32}))
    words = ["350M", "--gpus", "4xA100-80G", "--seq", "512", "--config", str(path), "--fit", "--axes", "d2m4"]
    fitted = invoke("plan", *words)
    assert fitted.exit_code == 0, fitted.stderr
    document = json.loads(fitted.stdout)
    assert document["train_batch_size"] == 32
    assert document["train_micro_batch_size_per_gpu"] == 4
    assert document["gradient_accumulation_steps"] == 4
    fitted = invoke("plan", *words[:-1], "d2m16")
    assert json.loads(fitted.stdout)["train_micro_batch_size_per_gpu"] == 1, "the four ranks alone take no 16"
    refused = invoke("plan", *words[:-1], "d3m4")
    assert refused.exit_code == 2
    assert "`--axes` says d3; 4 ranks do not divide by 3" in refused.stderr


def test_fit_says_how_a_script_trains_stages_that_an_option_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "train_batch_size": 32}))
    words = ["plan", "350M", "--gpus", "4xA100-80G", "--seq", "512", "--config", str(path), "--fit"]
    assert "the script trains with `engine.train_batch`" in invoke(*words, "--axes", "p4").stderr
    assert "engine.train_batch" not in invoke(*words, "--axes", "p1").stderr


def test_a_stage_that_is_chosen_by_assumed_speeds_says_so() -> None:
    told = as_json("1B", "--gpus", "2x4xL40S-48G", "--seq", "2048")
    (note,) = [one for one in told["assumed"] if one.startswith("no `--config`")]
    assert note.endswith("(the fastest that fits, unknown speeds taken for `network` 1.25 GB/s)")


def test_fit_says_that_no_speed_of_processors_is_known() -> None:
    fitted = invoke("plan", "350M", "-n", "4", "--seq", "512", "--host-memory", "64G", "--fit")
    assert fitted.exit_code == 0, fitted.stderr
    assert "unknown speeds taken for `flops` 0.05 TFLOP/s" in fitted.stderr
    assert "pipeline" not in json.loads(fitted.stdout)
