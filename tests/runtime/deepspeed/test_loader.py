"""DeepSpeed's loader shares a dataset out over the ranks, and says how many batches there are."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset, SequentialSampler

from dsrun.errors import ModelError
from dsrun.runtime.deepspeed.loader import DeepSpeedDataLoader


class Numbers(Dataset[int]):
    """0, 1, 2, ..."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def make(local_rank: int, **more: Any) -> DeepSpeedDataLoader:
    return DeepSpeedDataLoader(
        Numbers(), 2, False, local_rank, more.pop("tput_timer", None), num_local_io_workers=0, **more
    )


def test_each_rank_has_its_own_samples() -> None:
    seen: list[int] = []
    for rank in (0, 1):
        loader = make(rank, data_parallel_world_size=2, data_parallel_rank=rank)
        batches = [batch.tolist() for batch in loader]
        assert len(batches) == len(loader) == 3
        assert batches == [batch.tolist() for batch in loader], "each epoch is the same"
        seen += [number for batch in batches for number in batch]
    assert sorted(seen) == list(range(10))


def test_what_does_not_fill_a_batch_may_be_left_out() -> None:
    loader = make(0, data_parallel_world_size=2, data_parallel_rank=0, dataloader_drop_last=True)
    assert len(list(loader)) == len(loader) == 2


def test_a_sampler_a_function_and_a_timer_are_used() -> None:
    class Started:
        count = 0

        def start(self) -> None:
            self.count += 1

    timer = Started()
    loader = make(-1, data_sampler=SequentialSampler(Numbers()), collate_fn=sum, tput_timer=timer)
    assert list(loader) == [1, 5, 9, 13, 17]
    assert timer.count == 6  # the last call finds no batch


def test_a_curriculum_and_a_batch_before_an_epoch_are_refused() -> None:
    with pytest.raises(ModelError, match="curriculum_learning"):
        make(0, deepspeed_dataloader_config={"curriculum_learning": True})
    with pytest.raises(ModelError, match="no epoch has begun"):
        next(make(-1))
