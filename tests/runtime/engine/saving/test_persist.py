"""A run goes on from a checkpoint as if it had not stopped, on any number of ranks and at any stage."""

from __future__ import annotations

import json
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dsrun
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.reference import sharers
from dsrun.contract.environment import CHECKPOINT_EVENT, RESUME_ENV, RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import CheckpointError, InputError
from support.inside_engine import shards_of
from support.models import CONTEXT, VOCAB, TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import config, frozen_parameters, full_parameters, make_engine, train

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}


class Oddities(TinyGPT):
    """Tied and frozen weights, buffers of two kinds, a scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(width=40, layers=2, tied=True)
        self.blocks[0].requires_grad_(False)
        self.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        self.register_parameter("gain", nn.Parameter(torch.tensor(1.5)))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("transient", torch.zeros(3), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT) * self.gain


def data() -> TensorDataset:
    tokens = torch.randint(0, VOCAB, (50, CONTEXT + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def settings(stage: int, *, samples: int = 6, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return config(
        stage, micro=samples // accumulation // size, accumulation=accumulation, **{"scheduler": SCHEDULE, **more}
    )


def make(stage: int, *, seed: int = 7, **more: Any) -> Any:
    torch.manual_seed(seed)
    return make_engine(settings(stage, **more), model=Oddities(), seed=seed, training_data=data())


def take(engine: Any, steps: int) -> list[float]:
    """Optimizer steps on the engine's own loader; the global mean losses."""
    losses: list[float] = []
    total = torch.zeros((), dtype=torch.float64)
    while len(losses) < steps:
        for inputs, targets in engine.training_dataloader:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            total += loss.detach().double()
            if boundary:
                dist.all_reduce(total)
                losses.append(float(total) / engine.gradient_accumulation_steps() / engine.world_size)
                total.zero_()
            if len(losses) == steps:
                break
    return losses


def state_of(engine: Any) -> dict[str, Any]:
    return {
        "weights": full_parameters(engine),
        "frozen": list(frozen_parameters(engine).values()),
        "buffers": dict(engine.module.named_buffers()),
        "lr": engine.get_lr(),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "data": engine.training_dataloader.state_dict(),
        "schedule": engine.lr_scheduler.state_dict(),
    }


def _save_and_go_on(folder: str, stage: int, bf16: bool) -> tuple[dict[str, Any], list[float]]:
    dsrun.init_distributed()
    frozen = "reference" if bf16 else "copy"
    engine = make(stage, bf16=bf16, checkpoint={"asynchronous": not bf16, "frozen_parameters": frozen})
    engine.save_checkpoint(folder, tag="first", save_latest=False)
    take(engine, 3)
    engine.module.scale.fill_(1.25)
    engine.save_checkpoint(folder, client_state={"note": ["a", 1], "seen": {"of": torch.arange(6).view(2, 3)}})
    state = state_of(engine)
    losses = take(engine, 3)
    engine.wait_for_checkpoint()
    return state, losses


def _load_and_go_on(
    folder: str, stages: list[int], bf16: bool, accumulation: int
) -> list[tuple[dict[str, Any], list[float]]]:
    dsrun.init_distributed()
    found: list[tuple[dict[str, Any], list[float]]] = []
    for stage in stages:
        engine = make(stage, seed=99, bf16=bf16, accumulation=accumulation)
        path, client_state = engine.load_checkpoint(folder)
        assert path == str(Path(folder) / "global_step3")
        assert client_state is not None
        assert client_state["seen"]["of"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert client_state["note"] == ["a", 1]
        found.append((state_of(engine), take(engine, 3)))
    return found


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("lr", "counters", "data", "schedule"):
        assert found[key] == expected[key], key
    for key in ("weights", "buffers"):
        assert found[key].keys() == expected[key].keys()
        for name, value in expected[key].items():
            assert torch.equal(found[key][name], value), name
    assert all(torch.equal(a, b) for a, b in zip(found["frozen"], expected["frozen"], strict=True))


@pytest.mark.parametrize(
    ("stage", "bf16", "every"),
    [
        (0, False, False),
        (1, True, False),
        (2, False, False),
        (3, True, False),
        *(
            pytest.param(stage, bf16, True, marks=pytest.mark.soak("each stage loads what each saved, on some ranks"))
            for stage in range(4)
            for bf16 in (False, True)
        ),
    ],
)
def test_a_run_goes_on_at_every_stage_and_on_other_numbers_of_ranks(
    tmp_path: Path, stage: int, bf16: bool, every: bool
) -> None:
    saved = run_ranks(2, _save_and_go_on, str(tmp_path), stage, bf16)
    target = tmp_path / "global_step3"
    shared = {tag for tags in sharers(target, read_index(target)).values() for tag in tags}
    assert shared == ({"first"} if bf16 else set())
    expected_state, expected_losses = saved[0]
    for rank in range(2):
        assert saved[rank][1] == expected_losses
    # Each stage loads what each saved, on some number of ranks, or `every` one on two.
    near = [stage, (stage + 1) % 4]
    for state, losses in run_ranks(2, _load_and_go_on, str(tmp_path), [0, 1, 2, 3] if every else near, bf16, 1)[1]:
        assert_same_state(state, expected_state)
        assert losses == expected_losses
    alone = run_ranks(1, _load_and_go_on, str(tmp_path), near if every else [(stage + 2) % 4], bf16, 2)[0]
    three = run_ranks(3, _load_and_go_on, str(tmp_path), near if every else [(stage + 3) % 4], bf16, 1)[2]
    for state, losses in [*alone, *three]:
        assert_same_state(state, expected_state)
        assert losses == pytest.approx(expected_losses, rel=1e-2 if bf16 else 1e-5)
    if not bf16:
        assert all(losses == expected_losses for _, losses in alone), "one rank that accumulates is exact"


def test_files_are_safetensors_and_hold_every_element_once(tmp_path: Path) -> None:
    run_ranks(2, _save_and_go_on, str(tmp_path), 2, False)
    folder = tmp_path / "global_step3"
    index = read_index(folder)
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors") == sorted(index.files)
    assert list(verify(folder, index)) == []
    tools = [load_file(folder / name) for name in index.files]
    elements: Counter[tuple[str, str]] = Counter()
    for entries in tools:
        for key, values in entries.items():
            name, role = key.split("@")[0].split(":", 1)
            elements[name, role] += values.numel()
    model = Oddities()
    for name, param in model.named_parameters():
        assert elements[name, "param"] == param.numel()
        trained = param.requires_grad and param.numel()
        assert elements[name, "exp_avg"] == elements[name, "exp_avg_sq"] == (param.numel() if trained else 0)
    assert ("transient", "buffer") not in index.tensors
    assert index.tensors["mask", "buffer"].dtype == "BOOL"
    assert index.aliases == {"head.weight": "embed.weight"}
    assert index.values["versions"]["torch"] == torch.__version__
    assert index.values["mesh"] == {"tensor": 1}


def test_a_tied_weight_loads_into_a_model_that_does_not_tie_it(tmp_path: Path) -> None:
    tied = make_engine(config(1, micro=6), model=TinyGPT(tied=True))
    train(tied, range(2), samples=6)
    tied.save_checkpoint(tmp_path)
    weights = full_parameters(tied)
    for stage in (1, 3):
        loose = make_engine(config(stage, micro=6), model=TinyGPT(tied=False))
        loose.load_checkpoint(tmp_path)
        found = full_parameters(loose)
        assert torch.equal(found["head.weight"], weights["embed.weight"])
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        train(loose, range(2, 3), samples=6)  # with the states of the name it was tied to


def test_saving_a_tag_again_leaves_one_set_of_files(tmp_path: Path) -> None:
    engine = make(1)
    for tag in ("a", "a", 5):
        take(engine, 1)
        assert engine.save_checkpoint(tmp_path, tag=tag) is True
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".job-")) == ["5", "a", "latest"]
    assert len(list((tmp_path / "a").iterdir())) == 2
    assert (tmp_path / "latest").read_text() == "5"
    engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "5"
    assert engine.load_checkpoint(tmp_path, tag="a")[0] == str(tmp_path / "a")
    assert engine.global_steps == 2


def test_loading_in_the_middle_of_a_global_batch_starts_a_whole_one(tmp_path: Path) -> None:
    engine = make(3, samples=6, accumulation=3)
    take(engine, 1)
    engine.save_checkpoint(tmp_path)
    expected = take(engine, 2)
    inputs, targets = next(iter(engine.training_dataloader))
    engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    engine(inputs)  # a forward without a backward
    engine.load_checkpoint(tmp_path)
    assert take(engine, 2) == expected


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_a_backward_without_a_forward_are_not_added_after_a_load(tmp_path: Path, stage: int) -> None:
    engine = make(stage, samples=6)
    take(engine, 1)
    engine.save_checkpoint(tmp_path)
    expected = take(engine, 3)  # the rate of the first two is nothing
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    torch.stack([param.float().square().sum() for param in trained]).sum().mul(1e3).backward()
    engine.load_checkpoint(tmp_path)
    assert take(engine, 3) == expected


class Raising(torch.autograd.Function):
    """A step of a backward that raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError("does not fit")


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {}),
        (3, {}),
        (1, {"gradient_reduction": "update"}),
        (3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_a_backward_of_the_scripts_own_that_raised_leaves_nothing_to_a_load(
    tmp_path: Path, stage: int, more: dict[str, Any]
) -> None:
    engine = make(stage, samples=6, accumulation=2, **more)
    take(engine, 1)
    engine.save_checkpoint(tmp_path)
    expected = take(engine, 3)  # the rate of the first two is nothing
    inputs, targets = next(iter(engine.training_dataloader))
    engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    hook = engine.module.blocks[0].register_forward_hook(lambda module, args, output: Raising.apply(output))
    loss = loss_of(engine(inputs), targets)
    hook.remove()
    with pytest.raises(RuntimeError, match="does not fit"):
        loss.backward()
    engine.load_checkpoint(tmp_path)
    assert take(engine, 3) == expected


def test_parts_of_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    engine = make(2)
    take(engine, 2)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    weights = full_parameters(engine)

    fresh = make(2)
    frozen = {n: p.clone() for n, p in fresh.module.named_parameters() if not p.requires_grad}
    fresh.load_checkpoint(tmp_path, load_module_only=True)
    assert fresh.global_steps == 0
    assert fresh.get_lr() == [0.0]
    assert not shards_of(fresh).tensors()
    assert all(torch.equal(full_parameters(fresh)[name], value) for name, value in weights.items())
    assert all(torch.equal(dict(fresh.module.named_parameters())[name], value) for name, value in frozen.items())

    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert not shards_of(fresh).tensors()
    assert fresh.global_steps == 2
    assert fresh.lr_scheduler.last_batch_iteration == 1


def test_the_schedules_of_torch_come_back(tmp_path: Path) -> None:
    def build() -> Any:
        settings_ = config(1, micro=6)
        return make_engine(
            settings_, lr_scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[2, 4], gamma=0.5)
        )

    engine = build()
    train(engine, range(3), samples=6)
    engine.save_checkpoint(tmp_path)
    other = build()
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == engine.get_lr() == [0.005]
    train(other, range(2), samples=6)
    assert other.get_lr() == [0.0025]
    warm = make_engine(config(1, micro=6, scheduler=SCHEDULE))
    with pytest.raises(CheckpointError, match="its schedule is a MultiStepLR; this run's is a WarmupLR"):
        warm.load_checkpoint(tmp_path)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["../x", "/tmp/x", "", "a" * 300, "a\n", ".x", "a/b", "latest", "-x", "a b"])
def test_tags_that_are_no_folder_names_are_refused(tmp_path: Path, tag: str) -> None:
    engine = make_engine(config(0, micro=6))
    with pytest.raises(CheckpointError, match="tag is"):
        engine.save_checkpoint(tmp_path / "ck", tag=tag)
    with pytest.raises(CheckpointError, match="tag is"):
        engine.load_checkpoint(tmp_path / "ck", tag=tag)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_named_with_the_tags_there_are(tmp_path: Path) -> None:
    engine = make_engine(config(0, micro=6))
    with pytest.raises(InputError, match="save_dir is empty"):
        engine.save_checkpoint("")
    assert engine.load_checkpoint(tmp_path, missing_ok=True) == (None, None)
    with pytest.raises(CheckpointError, match="there is no file `latest`"):
        engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="one")
    engine.save_checkpoint(tmp_path, tag="two")
    for content in (b"gone", b"../one", b"\xff\x00" * 400, b""):
        (tmp_path / "latest").write_bytes(content)
        for missing_ok in (False, True):
            with pytest.raises(CheckpointError, match="complete tags here: one, two"):
                engine.load_checkpoint(tmp_path, missing_ok=missing_ok)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="complete tags here: one, two"):
        engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"index.json is missing; complete tags here: one, two"):
        engine.load_checkpoint(tmp_path, tag="three")


def test_damage_is_named(tmp_path: Path) -> None:
    engine = make_engine(config(1, micro=6))
    engine.save_checkpoint(tmp_path, tag="t")
    index = tmp_path / "t" / "index.json"
    whole = index.read_bytes()
    for damaged in (whole[:-200], b"[]", b'{"format": 1}', b"\x00"):
        index.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="the index is damaged"):
            engine.load_checkpoint(tmp_path)
    index.write_bytes(whole)
    file = next((tmp_path / "t").glob("*.safetensors"))
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], content[:5], b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"rank-00000-.*cannot be read"):
            engine.load_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000-.*cannot be read"):
        engine.load_checkpoint(tmp_path)


def test_every_difference_to_another_model_is_listed(tmp_path: Path) -> None:
    make_engine(config(1, micro=6)).save_checkpoint(tmp_path)
    before = make_engine(config(1, micro=6), model=TinyGPT(layers=4, width=64))
    weights = full_parameters(before)
    with pytest.raises(CheckpointError) as caught:
        before.load_checkpoint(tmp_path)
    text = caught.value.render()
    assert "`embed.weight` has shape (61, 72); the model's has (61, 64)" in text
    assert "no param of `blocks.3.qkv.weight`, which the model has" in text
    assert text.count("error:") > 12
    assert all(torch.equal(full_parameters(before)[name], value) for name, value in weights.items())

    fewer = make_engine(config(1, micro=6), model=TinyGPT(layers=2))
    with pytest.raises(CheckpointError, match=r"param of `blocks.2.\S+` is not in the model"):
        fewer.load_checkpoint(tmp_path)
    fewer.load_checkpoint(tmp_path, load_module_strict=False)


def test_another_optimizer_and_parameters_without_state_are_refused(tmp_path: Path) -> None:
    engine = make(1)
    take(engine, 1)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="states are AdamW's; this run's optimizer is SGD"):
        make(1, optimizer="SGD").load_checkpoint(tmp_path)
    thawed = Oddities().requires_grad_()
    other = make_engine(settings(1), model=thawed, training_data=data())
    with pytest.raises(CheckpointError, match=r"no exp_avg of `blocks\.0\.\S+`, which was not trained then"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)


def test_values_that_json_cannot_hold_are_named_and_leave_nothing(tmp_path: Path) -> None:
    engine = make_engine(config(0, micro=6))
    for value, place in (
        ({"x": {1, 2}}, r"\['x'\] is a set"),
        ({"x": [0, {"y": object()}]}, r"\['x'\]\[1\]\['y'\] is a"),
    ):
        with pytest.raises(CheckpointError, match=f"client_state{place}"):
            engine.save_checkpoint(tmp_path, tag="t", client_state=value)
    assert not list(tmp_path.rglob("*.*"))
    strange = make_engine(config(0, micro=6))
    strange.module.register_buffer("strange", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"`strange:buffer` is torch.complex128"):
        strange.save_checkpoint(tmp_path)
    assert not (tmp_path / "latest").exists()


def _save_where_one_rank_fails(folder: str) -> list[str]:
    dsrun.init_distributed()
    engine = make(2)
    take(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    texts: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as on a full disk
    for tag in ("bad", "good"):
        try:
            engine.save_checkpoint(folder, tag=tag)
        except CheckpointError as error:
            texts.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    engine.load_checkpoint(folder)
    state = {"x": {1}} if dist.get_rank() == 1 else {}
    try:
        engine.save_checkpoint(folder, tag="bad", client_state=state)
    except CheckpointError as error:
        texts.append(str(error))
    if dist.get_rank() == 1:
        file = next((Path(folder) / "good").glob("rank-00001*"))
        file.write_bytes(file.read_bytes()[:-2000])
    dist.barrier()
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        texts.append(str(error))
    return texts


def test_a_failure_of_one_rank_is_raised_on_all_and_publishes_nothing(tmp_path: Path) -> None:
    texts = run_ranks(2, _save_where_one_rank_fails, str(tmp_path))
    assert [len(rank) for rank in texts] == [4, 4]
    for rank in texts:
        assert all(f"nothing was published: rank 1: {tmp_path}" in text for text in rank[:2])
        assert all(": cannot be written: File too large" in text for text in rank[:2])
    assert "rank 1 could not save its part, nothing was published: client_state['x'] is a set" in texts[0][2]
    assert "client_state['x'] is a set" in texts[1][2]
    assert any("cannot be read" in rank[3] for rank in texts)
    assert not (tmp_path / "bad").exists()
    assert (tmp_path / "latest").read_text() == "good"
    assert len(list((tmp_path / "good").iterdir())) == 3


def test_a_file_where_the_folder_should_be_is_an_error(tmp_path: Path) -> None:
    engine = make_engine(config(0, micro=6))
    (tmp_path / "t").write_text("")
    with pytest.raises(CheckpointError, match=r"t: could not be saved, nothing was published"):
        engine.save_checkpoint(tmp_path, tag="t")


def test_what_a_save_records_is_what_a_job_started_again_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path / "job"))
    engine = make_engine(config(1, micro=2))
    train(engine, range(2), samples=2)
    engine.save_checkpoint("here", tag="a", client_state={"epoch": 3})
    engine.save_checkpoint("here", tag="b", client_state={"epoch": 4})
    records = [json.loads(line) for line in JobPaths(tmp_path / "job").records.read_text().splitlines()]
    saved = [record for record in records if record["event"] == CHECKPOINT_EVENT]
    assert [(record["tag"], record["step"]) for record in saved] == [("a", 2), ("b", 2)]
    assert saved[0]["path"] == str(tmp_path / "here" / "a")
    monkeypatch.setenv(RESUME_ENV, saved[0]["path"])
    again = make_engine(config(1, micro=2), seed=8)
    assert again.load_checkpoint() == (saved[0]["path"], {"epoch": 3})
    assert again.load_checkpoint("here")[1] == {"epoch": 3}
    assert again.load_checkpoint("here", tag="b")[1] == {"epoch": 4}
    assert again.global_steps == 2


def test_a_save_whose_record_finds_no_room_is_whole_and_says_what_that_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = JobPaths(tmp_path / "job").records
    records.parent.mkdir()
    records.symlink_to("/dev/full")
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path / "job"))
    engine = make_engine(config(1, micro=2))
    train(engine, range(2), samples=2)
    engine.save_checkpoint(tmp_path / "here", tag="a")
    engine.destroy()
    told = capsys.readouterr().out
    assert f"dsrun: records: {records}: No space left on device; `checkpoint` is not recorded\n" in told
    (line,) = [line for line in told.splitlines() if line.startswith("saved ")]
    assert line.endswith("; not recorded: a restart goes on from the checkpoint that was recorded before")
    assert make_engine(config(1, micro=2), seed=8).load_checkpoint(tmp_path / "here")[0] == str(tmp_path / "here" / "a")


def _addresses() -> list[str]:
    engine = make_engine(config(0, micro=1))
    texts: list[str] = []
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_on_signal):
        for given in ("s3://", Path("s3://bucket/run")):
            with pytest.raises(InputError) as caught:
                call(given)
            texts.append(caught.value.render())
    engine.save_checkpoint("memory://run", client_state={"epoch": 3})
    assert engine.load_checkpoint("memory://run") == ("memory://run/global_step0", {"epoch": 3})
    with pytest.raises(CheckpointError, match="memory://run/other: no complete checkpoint"):
        engine.load_checkpoint("memory://run", tag="other")
    with pytest.raises(InputError, match="save_16bit_model: save_dir is s3://bucket/run; expected a folder"):
        engine.save_16bit_model("s3://bucket/run")
    engine.destroy()
    return texts


def test_an_address_is_saved_to_and_loaded_from_unless_it_names_nothing_or_became_a_path() -> None:
    texts = run_ranks(1, _addresses)[0]
    assert all("s3://: it names no bucket and no folder" in text for text in texts[::2])
    assert all("an address was made a Path" in text and "pass it as a str" in text for text in texts[1::2])
