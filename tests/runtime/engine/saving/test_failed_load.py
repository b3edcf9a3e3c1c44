"""A load that fails leaves everything as it was; or, where values were replaced already, an engine that refuses to use
them. Either way on every rank, with the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsrun
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.errors import CheckpointError
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

HOST: dict[str, Any] = {"device": "cpu"}
#: Stage, dtype and offload of the engines whose loads fail.
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, bf16": {"stage": 1, "bf16": True},
    "stage 2, optimizer on the host": {"stage": 2, "zero_optimization": {"offload_optimizer": HOST}},
    "stage 1, optimizer on a drive": {"stage": 1, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "stage 3": {"stage": 3},
    "stage 3, bf16, all on the host": {
        "stage": 3,
        "bf16": True,
        "zero_optimization": {
            "offload_optimizer": {**HOST, "split_master": True, "state_format": "bf16"},
            "offload_param": HOST,
        },
    },
}


class Stubborn:
    """A schedule whose state cannot be taken over on some ranks."""

    def __init__(self, *, fails_on: int | None = None) -> None:
        self.steps = 0
        self.fails_on = fails_on

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == self.fails_on:
            raise ValueError("this schedule takes nothing")
        self.steps = state_dict["steps"]


def settings(kind: str, folder: Path, *, accumulation: int = 1) -> dict[str, Any]:
    options = dict(KINDS[kind])
    stage = options.pop("stage")
    zero = {"stage": stage, **options.pop("zero_optimization", {})}
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            folder.mkdir(exist_ok=True)
            zero[section] = {**zero[section], "nvme_path": str(folder)}
    made = config(stage, micro=2, accumulation=accumulation, **options)
    return {**made, "zero_optimization": zero}


@contextmanager
def refused(*words: str, without: str = " ever ") -> Generator[None]:
    """What is done inside is refused, in these words."""
    with pytest.raises(CheckpointError) as caught:
        yield
    message = caught.value.render()
    assert all(word in message for word in words), message
    assert without not in message, message


def flip(path: Path, *, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def on_first(work: Callable[[], object]) -> None:
    """Does something on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def one_loss(engine: Any) -> Any:
    inputs, targets = batches(9, samples=2)
    return loss_of(engine(inputs), targets)


def _damaged_data(folder: str, kinds: list[str]) -> None:
    """A block of rank 1's file is damaged, which only rank 1 reads where states are sharded."""
    dsrun.init_distributed()
    for number, kind in enumerate(kinds):
        place = Path(folder) / str(number)
        engine = make_engine(settings(kind, place))
        train(engine, range(1), samples=4)
        engine.save_checkpoint(place, tag="whole")
        train(engine, range(1, 2), samples=4)
        expected = full_parameters(engine)
        engine.load_checkpoint(place, tag="whole")
        engine.save_checkpoint(place, tag="damaged")
        (file,) = (place / "damaged").glob("rank-00001-*")
        on_first(partial(flip, file, at=file.stat().st_size - 5))
        train(engine, range(5, 7), samples=4)
        loss = one_loss(engine)

        # Random numbers are read with the first look, and so is the block that they lie in.
        with refused("damaged, of", without="part old"):
            engine.load_checkpoint(place, tag="damaged")
        train(engine, range(7, 8), samples=4)
        with refused("rank-00001-", "damaged, of", "not used until a load succeeds"):
            engine.load_checkpoint(place, tag="damaged", load_random_state=False)
        for what in (
            partial(one_loss, engine),
            torch.no_grad()(partial(one_loss, engine)),
            partial(engine.backward, loss),
            engine.step,
            partial(engine.save_checkpoint, place, tag="mixture"),
            engine.module_state_dict,
            partial(engine.save_16bit_model, place),
        ):
            with refused("parameters and buffers", "part old, part new"):
                what()
        with refused("nowhere"):
            engine.load_checkpoint(place, tag="nowhere")
        with refused("parameters and buffers"):  # that has not made it whole
            one_loss(engine)
        assert not (place / "mixture").exists(), kind
        assert (place / "latest").read_text().strip() == "damaged"
        # The parameters alone do not make optimizer states whole.
        engine.load_checkpoint(place, tag="whole", load_module_only=True)
        with refused("the engine's optimizer states, counters and place in the data are part old"):
            one_loss(engine)
        engine.load_checkpoint(place, tag="whole")
        train(engine, range(1, 2), samples=4)
        for name, values in full_parameters(engine).items():
            assert torch.equal(values, expected[name]), f"{kind}: {name}"
        engine.destroy()


#: Not sharded, and on the device, the host and a drive.
SOME_KINDS = [
    "stage 0",
    "stage 1, optimizer on a drive",
    "stage 2, optimizer on the host",
    "stage 3, bf16, all on the host",
]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(SOME_KINDS, id="some"),
        pytest.param(
            [kind for kind in KINDS if kind not in SOME_KINDS],
            id="others",
            marks=pytest.mark.soak("each stage with its state elsewhere, and what is seen before at stages 1 and 3"),
        ),
    ],
)
def test_an_engine_whose_state_is_torn_refuses_to_use_it_on_every_rank_until_a_load_succeeds(
    tmp_path: Path, kinds: list[str]
) -> None:
    run_ranks(2, _damaged_data, str(tmp_path), kinds)


def _looked_at(folder: str, kind: str) -> None:
    """What can be seen before anything is read changes nothing: weights, sums of gradients and place stay."""
    dsrun.init_distributed()
    place = Path(folder)
    losses: list[list[float]] = []
    for spoils in (False, True):
        if spoils:
            other = make_engine(settings(kind, place), model=TinyGPT(width=24))
            other.save_checkpoint(place, tag="other")
        engine = make_engine(settings(kind, place, accumulation=2))
        train(engine, range(1), samples=8)
        if spoils:
            for tag in ("index", "cut", "gone", "client"):
                state = {"kept": torch.arange(4)} if tag == "client" else None
                engine.save_checkpoint(place, tag=tag, client_state=state)
            on_first(partial(spoil, place))
        loss = one_loss(engine)
        engine.backward(loss)
        engine.step()  # of two
        if spoils:
            for tag, cause in (("index", "index"), ("cut", "it has"), ("gone", "cannot be read"), ("other", "model")):
                with refused(cause, without="part old"):
                    engine.load_checkpoint(place, tag=tag)
            # A rank that sees another folder, or none, is not alone with it.
            first = dist.get_rank() == 0
            with refused("rank 1" if first else "elsewhere"):
                engine.load_checkpoint(place if first else place / "elsewhere", tag="client")
            for other in ("cut", "nowhere"):
                with refused():
                    engine.load_checkpoint(place, tag="client" if first else other)
            with refused("different checkpoints"):
                engine.load_checkpoint(place if first else place / "empty", missing_ok=True)
        engine.backward(one_loss(engine))
        engine.step()
        assert engine.global_steps == 2
        losses.append([*train(engine, range(3, 5), samples=8)])
        engine.destroy()
    assert losses[0] == losses[1]


def spoil(place: Path) -> None:
    flip(place / "index" / INDEX_FILE, at=200)
    (cut,) = (place / "cut").glob("rank-00001-*")
    cut.write_bytes(cut.read_bytes()[:-3])
    (gone,) = (place / "gone").glob("rank-00000-*")
    gone.unlink()
    (place / "empty").mkdir()


@pytest.mark.parametrize("kind", ["stage 1, bf16", "stage 3"])
def test_what_is_seen_before_a_load_changes_nothing(tmp_path: Path, kind: str) -> None:
    run_ranks(2, _looked_at, str(tmp_path), kind)


def _stubborn_schedule(folder: str) -> None:
    dsrun.init_distributed()
    place = Path(folder)
    whole = make_engine(settings("stage 1, bf16", place), lr_scheduler=Stubborn())
    train(whole, range(2), samples=4)
    whole.save_checkpoint(place)
    engine = make_engine(settings("stage 1, bf16", place), lr_scheduler=Stubborn(fails_on=1))
    with refused("ValueError: this schedule takes nothing"):
        engine.load_checkpoint(place)
    with refused("schedule"):
        one_loss(engine)
    engine.load_checkpoint(place, load_lr_scheduler_states=False)
    with refused("the engine's schedule is part old"):
        one_loss(engine)
    engine.lr_scheduler.fails_on = None
    engine.load_checkpoint(place)
    assert engine.lr_scheduler.steps == 2
    one_loss(engine)


def test_a_schedule_that_takes_nothing_on_one_rank_fails_the_load_on_all(tmp_path: Path) -> None:
    run_ranks(2, _stubborn_schedule, str(tmp_path))


def _weights(folder: str, stages: list[int]) -> None:
    """Whole weights that do not fit, or cannot be read, on one rank."""
    dsrun.init_distributed()
    place = Path(folder)
    for stage in stages:
        engine = make_engine(config(stage, micro=2))
        weights = engine.module_state_dict(all_ranks=True)
        before = full_parameters(engine)
        here = dict(weights)
        if dist.get_rank() == 1:
            del here["head.weight"]
        with refused("head.weight", without="part old"):
            engine.load_module_state_dict(here)
        engine.save_16bit_model(place, "model.safetensors")
        with refused(without="part old"):
            dsrun.zero.load_pretrained(engine.module, place / ("none" if dist.get_rank() else "model.safetensors"))
        for name, values in full_parameters(engine).items():
            assert torch.equal(values, before[name])
        one_loss(engine)

        unreadable = {name: values.to("meta") for name, values in weights.items() if name == "head.weight"}
        there = {**weights, **(unreadable if dist.get_rank() == 0 else {})}
        with refused("not used until a load succeeds"):
            engine.load_module_state_dict(there)
        with refused("parameters and buffers"):
            one_loss(engine)
        engine.load_module_state_dict({"head.weight": weights["head.weight"]}, strict=False)
        with refused("parameters and buffers"):  # which were the others?
            one_loss(engine)
        dsrun.zero.load_pretrained(engine.module, place / "model.safetensors")
        for name, values in full_parameters(engine).items():
            assert torch.equal(values, before[name])
        one_loss(engine)


def test_weights_that_one_rank_cannot_take_are_taken_by_none(tmp_path: Path) -> None:
    run_ranks(2, _weights, str(tmp_path), [0, 2, 3])
