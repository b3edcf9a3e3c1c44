"""Batch arithmetic."""

from __future__ import annotations

import pytest

from dsrun.config.batch import BatchSizes, solve
from dsrun.errors import ConfigError


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "expected"),
    [
        (16, 4, 2, 2, BatchSizes(16, 4, 2)),
        (16, 4, None, 2, BatchSizes(16, 4, 2)),
        (16, None, 2, 2, BatchSizes(16, 4, 2)),
        (None, 4, 2, 2, BatchSizes(16, 4, 2)),
        (16, None, None, 2, BatchSizes(16, 8, 1)),
        (None, 4, None, 2, BatchSizes(8, 4, 1)),
        (None, 1, None, 1, BatchSizes(1, 1, 1)),
    ],
)
def test_missing_values_are_filled_in(
    train: int | None, micro: int | None, steps: int | None, ranks: int, expected: BatchSizes
) -> None:
    assert solve(train, micro, steps, data_parallel_size=ranks) == expected


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "message", "hint"),
    [
        (
            10,
            4,
            1,
            2,
            "`train_batch_size` 10 != micro batch 4 x accumulation 1 x data-parallel size 2 (8)",
            "nearest that fits: `train_batch_size` 8 = micro batch 4 x accumulation 1 x data-parallel size 2",
        ),
        (
            10,
            4,
            None,
            1,
            "`train_batch_size` 10 is no multiple of micro batch 4 x data-parallel size 1 (4)",
            "nearest that fits: `train_batch_size` 12 = micro batch 4 x accumulation 3 x data-parallel size 1",
        ),
        (
            8,
            16,
            None,
            1,
            "`train_batch_size` 8 is no multiple of micro batch 16 x data-parallel size 1 (16)",
            "nearest that fits: `train_batch_size` 16 = micro batch 16 x accumulation 1 x data-parallel size 1",
        ),
        (
            10,
            None,
            None,
            4,
            "`train_batch_size` 10 is no multiple of 4, the data-parallel size (4 ranks)",
            "nearest that fits: `train_batch_size` 8 = micro batch 2 x accumulation 1 x data-parallel size 4",
        ),
        (
            10,
            None,
            3,
            2,
            "`train_batch_size` 10 is no multiple of accumulation 3 x data-parallel size 2 (6)",
            "nearest that fits: `train_batch_size` 12 = micro batch 2 x accumulation 3 x data-parallel size 2",
        ),
        (
            None,
            None,
            4,
            2,
            "`gradient_accumulation_steps` alone does not say how large a batch is; "
            "expected `train_micro_batch_size_per_gpu` or `train_batch_size`",
            'add "train_micro_batch_size_per_gpu": 1 and raise it while memory lasts',
        ),
        (
            None,
            None,
            None,
            2,
            "the config does not say how large a batch is; "
            "expected `train_micro_batch_size_per_gpu` or `train_batch_size`",
            'add "train_micro_batch_size_per_gpu": 1 and raise it while memory lasts',
        ),
    ],
)
def test_misfit_shows_the_equation_and_the_nearest_triple(
    train: int | None, micro: int | None, steps: int | None, ranks: int, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(train, micro, steps, data_parallel_size=ranks)
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_every_value_below_one_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(0, -1, 1, data_parallel_size=2, place="ds.json:2:3: ")
    assert [problem.message for problem in caught.value.problems] == [
        "ds.json:2:3: `train_batch_size` is 0; expected a whole number of at least 1",
        "ds.json:2:3: `train_micro_batch_size_per_gpu` is -1; expected a whole number of at least 1",
    ]


def test_misfit_says_how_the_data_parallel_size_came_about() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(10, 4, 1, data_parallel_size=2, derivation="4 ranks / tensor parallel 2")
    assert str(caught.value).endswith("(8); data-parallel size is 4 ranks / tensor parallel 2")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("train", [1, 10, 97, 4096])
@pytest.mark.parametrize("micro", [1, 3, 64])
def test_the_nearest_triple_always_fits(train: int, micro: int, ranks: int) -> None:
    try:
        solve(train, micro, 2, data_parallel_size=ranks)
    except ConfigError as error:
        words = (error.hint or "").replace("`", "").split()
        fixed = solve(int(words[4]), int(words[8]), int(words[11]), data_parallel_size=ranks)
        assert fixed.train_batch_size >= 1
