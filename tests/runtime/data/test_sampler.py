"""Micro batches as indices for a script's own DataLoader, and a position that counts what was handed out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.data.order import EpochEnd
from dsrun.runtime.data.sampler import ShardedSampler
from support.ranks import run_ranks


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def samplers(length: int, micro: int, size: int, end: EpochEnd = "carry") -> list[ShardedSampler]:
    return [ShardedSampler(length, micro_batch=micro, rank=rank, size=size, end=end) for rank in range(size)]


def take(ranks: list[ShardedSampler], rounds: int) -> list[int]:
    """The next samples in their global order: (micro step, rank)."""
    seen: list[int] = []
    while rounds:
        for step in zip(*(rank.follow(rank) for rank in ranks), strict=True):
            seen += [index for batch in step for index in batch]
            rounds -= 1
            if not rounds:
                break
    return seen


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 3), (3, 1), (6, 2)])
def test_after_a_resume_on_any_number_of_ranks_the_next_samples_come_across_the_ends_of_epochs(
    before: int, after: int
) -> None:
    whole = take(samplers(25, 6, 1), 16)
    first = samplers(25, 6 // before, before)
    assert take(first, 7) == whole[:42]
    states = [sampler.state_dict() for sampler in first]
    assert states == [{"epoch": 1, "samples_seen": 17, "seed": 1234}] * before
    second = samplers(25, 6 // after, after)
    for sampler in second:
        sampler.load_state_dict(states[0])
    assert take(second, 9) == whole[42:]


def test_a_round_need_not_divide_a_position() -> None:
    whole = take(samplers(25, 1, 1), 50)
    (sampler,) = samplers(25, 7, 1)
    sampler.load_state_dict({"epoch": 0, "samples_seen": 9, "seed": 1234})
    assert take([sampler], 5) == whole[9:44]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_has_asked_for_in_advance_does_not_count(workers: int) -> None:
    sampler = ShardedSampler(Numbers(20), micro_batch=2)
    loader = DataLoader(Numbers(20), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    batches = sampler.follow(loader)
    seen = [index for _ in range(3) for index in next(batches).tolist()]
    assert sampler.samples_seen == 6
    del batches
    seen += [index for batch in sampler.follow(loader) for index in batch.tolist()]
    assert sorted(seen) == list(range(20))
    assert (sampler.epoch, sampler.samples_seen) == (1, 0)


def test_an_iteration_goes_on_where_a_position_is_taken_over() -> None:
    (sampler,) = samplers(12, 2, 1)
    whole = take(samplers(12, 2, 1), 6)
    seen: list[int] = []
    for number, batch in enumerate(sampler.follow(sampler)):
        seen += batch
        if number == 3:
            sampler.load_state_dict({"epoch": 0, "samples_seen": 2, "seed": 1234})
    assert seen == whole[:8] + whole[2:]
    assert sampler.epoch == 1


def test_the_length_is_that_of_the_present_epoch() -> None:
    (sampler,) = samplers(10, 4, 1)
    found: list[tuple[int, int]] = []
    for _ in range(3):
        length = len(sampler)
        lengths = [len(sampler) for _ in sampler.follow(sampler)]
        assert set(lengths[:-1]) == {length}
        found.append((length, len(lengths)))
    assert found == [(3, 3), (2, 2), (3, 3)], "two of the first epoch's last four samples are the second's"
    assert [len(samplers(10, 2, 2, end)[0]) for end in ("fill", "drop")] == [3, 2]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ModelError, match="3 samples do not fill a micro batch of 4 on 2 ranks"):
        samplers(3, 4, 2, "drop")
    with pytest.raises(ModelError, match="0 samples do not fill"):
        samplers(0, 1, 1)
    assert len(take(samplers(3, 4, 2), 2)) == 16


def _of_this_rank() -> list[int]:
    dsrun.init_distributed()
    sampler = dsrun.data.ShardedSampler(8, micro_batch=2, shuffle=False)
    mine = [index for batch in sampler.follow(sampler) for index in batch]
    gathered = [torch.zeros(len(mine), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(mine))
    return [index for rank in gathered for index in rank.tolist()]


def test_a_script_need_not_say_which_rank_it_is() -> None:
    assert run_ranks(2, _of_this_rank) == [[0, 1, 4, 5, 2, 3, 6, 7]] * 2
