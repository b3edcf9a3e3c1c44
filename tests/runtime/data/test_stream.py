"""Streams are shared out in their own order, and gone on with where the dataset can find its place again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from dsrun.errors import CheckpointError, ModelError
from dsrun.runtime.data.loader import LoaderOptions, TrainingLoader
from dsrun.runtime.data.stream import StreamLoader
from support.training import config, make_engine


class Plain(IterableDataset[Tensor]):
    """Numbers in order, each with one that was drawn."""

    def __init__(self, count: int = 14) -> None:
        self.count = count
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.stack([torch.tensor(float(self.at - 1)), torch.rand(())])
        self.at = 0


class Resumable(Plain):
    """Says where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Opaque(Resumable):
    """Has a state that is no JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}


def make(dataset: IterableDataset[Tensor], rank: int = 0, size: int = 1, workers: int = 0) -> StreamLoader:
    options = LoaderOptions(seed=3, workers=workers)
    return StreamLoader(dataset, micro_batch=2, rank=rank, size=size, collate_fn=None, options=options)


def test_ranks_share_a_stream_in_its_order_and_its_draws_move_nothing_else() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = torch.cat(list(make(Plain(14))))
    assert whole[:, 0].tolist() == list(range(14))
    assert len(whole[:, 1].unique()) == 14
    both = [list(make(Plain(14), rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([batch for pair in zip(*both, strict=True) for batch in pair]), whole[:12])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_stream_goes_on_at_the_same_sample_on_any_number_of_ranks(before: int, after: int) -> None:
    loaders = [make(Resumable(), rank, before) for rank in range(before)]
    for loader in loaders:
        list(loader)  # an epoch
        for _, _batch in zip(range(2 // before), loader, strict=False):
            pass
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states)
    assert (states[0]["epoch"], states[0]["samples_seen"]) == (1, 4)
    rest = []
    for rank in range(after):
        loader = make(Resumable(), rank, after)
        loader.load_state_dict(states[0])
        rest.append(list(loader))
        assert (loader.epoch, loader.samples_seen) == (2, 0)
    numbers = torch.cat([batch for rank in zip(*rest, strict=True) for batch in rank])[:, 0].tolist()
    assert numbers == list(range(4, 14 if after == 1 else 12))


@pytest.mark.parametrize(
    ("saved", "loaded", "said"),
    [(Plain, Plain, "Plain has no load_state_dict"), (Opaque, Resumable, "no state of Resumable was saved")],
)
def test_what_cannot_be_found_again_is_an_error_of_loading_and_of_nothing_else(
    saved: type[Plain], loaded: type[Plain], said: str
) -> None:
    loader = make(saved())
    next(iter(loader))
    state = loader.state_dict()
    other = make(loaded())
    with pytest.raises(CheckpointError, match=f"training_data: {said} to go on at sample 2 of epoch 0 by|{said} .*"):
        other.load_state_dict(state)
    assert other.samples_seen == 0
    list(loader)
    other.load_state_dict(loader.state_dict())  # the beginning of an epoch is found by everyone
    assert other.epoch == 1


def test_workers_whose_copies_are_ahead_are_refused() -> None:
    with pytest.raises(ModelError, match="Plain is a stream, and `dataloader_num_workers` is 2"):
        make(Plain(), workers=2)


def test_a_position_of_a_stream_is_none_of_a_shuffled_dataset() -> None:
    loader = TrainingLoader([1, 2, 3, 4], micro_batch=2, rank=0, size=1)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="was saved with a stream"):
        loader.check_state({"epoch": 0, "samples_seen": 2, "seed": 1, "stream": {}})


def test_an_engine_saves_the_place_in_a_stream_and_loads_nothing_where_it_cannot_be_found(tmp_path: Path) -> None:
    for dataset in (Resumable(), Plain()):
        engine = make_engine(config(0, micro=2), training_data=dataset)
        next(iter(engine.training_dataloader))
        engine.save_checkpoint(tmp_path, tag=type(dataset).__name__)
        engine.destroy()
    engine = make_engine(config(0, micro=2), seed=8, training_data=Resumable())
    engine.load_checkpoint(tmp_path, tag="Resumable")
    assert next(iter(engine.training_dataloader))[:, 0].tolist() == [2, 3]
    engine.destroy()
    engine = make_engine(config(0, micro=2), seed=8, training_data=Plain())
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with pytest.raises(CheckpointError, match="Plain has no load_state_dict"):
        engine.load_checkpoint(tmp_path, tag="Plain")
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    engine.load_checkpoint(tmp_path, tag="Plain", load_module_only=True)
    engine.destroy()
