"""Batch arithmetic: train batch = micro batch x accumulation steps x data-parallel size. Pure; knows no config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsrun.errors import ConfigError, Problem

TRAIN_KEY = "train_batch_size"
MICRO_KEY = "train_micro_batch_size_per_gpu"
STEPS_KEY = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """A batch triple that fits the data-parallel size.

    Attributes:
        train_batch_size: samples per optimizer update over all ranks.
        micro_batch: samples per forward pass of one rank.
        accumulation_steps: forward passes per optimizer update.
    """

    train_batch_size: int
    micro_batch: int
    accumulation_steps: int


def solve(
    train_batch_size: int | None,
    micro_batch: int | None,
    accumulation_steps: int | None,
    *,
    data_parallel_size: int,
    derivation: str = "",
    place: str = "",
) -> BatchSizes:
    """Fills in what is not given and checks what is.

    One value too few is computed; accumulation defaults to 1 where only one batch size is given.

    Args:
        train_batch_size: samples per update, or None.
        micro_batch: samples per rank and forward pass, or None.
        accumulation_steps: forward passes per update, or None.
        data_parallel_size: ranks that see different samples, at least 1.
        derivation: origin of the data-parallel size, in words for messages, e.g. `8 ranks / tensor parallel 2`.
        place: prefix of messages, e.g. `ds.json:3:5: `.

    Raises:
        ConfigError: a value is below 1, too few are given, or they do not fit; the hint has the nearest that fit.
    """
    assert data_parallel_size >= 1, "the launcher never makes an empty job"
    _require_positive(train_batch_size, micro_batch, accumulation_steps, place)
    train, micro, steps, ranks = train_batch_size, micro_batch, accumulation_steps, data_parallel_size
    if train is None and micro is None:
        given = f"`{STEPS_KEY}` alone does not" if steps is not None else "the config does not"
        raise ConfigError(
            f"{place}{given} say how large a batch is; expected `{MICRO_KEY}` or `{TRAIN_KEY}`",
            hint=f'add "{MICRO_KEY}": 1 and raise it while memory lasts',
        )
    how = f", the data-parallel size ({derivation or f'{ranks} ranks'})"
    if train is None:
        assert micro is not None
        steps = steps or 1
        return BatchSizes(micro * steps * ranks, micro, steps)
    if micro is not None and steps is not None:
        if micro * steps * ranks != train:
            message = (
                f"`{TRAIN_KEY}` {train} != micro batch {micro} x accumulation {steps}"
                f" x data-parallel size {ranks} ({micro * steps * ranks})"
            )
            message += f"; data-parallel size is {derivation}" if derivation else ""
            raise ConfigError(place + message, hint=_nearest(train, micro, steps, ranks))
        return BatchSizes(train, micro, steps)
    if micro is not None:
        if train % (micro * ranks):
            message = (
                f"`{TRAIN_KEY}` {train} is no multiple of micro batch {micro} x data-parallel size {ranks}"
                f" ({micro * ranks})"
            )
            message += f"; data-parallel size is {derivation}" if derivation else ""
            raise ConfigError(place + message, hint=_nearest(train, micro, None, ranks))
        return BatchSizes(train, micro, train // (micro * ranks))
    steps = steps or 1
    if train % (steps * ranks):
        parts = f"accumulation {steps} x data-parallel size {ranks} ({steps * ranks})" if steps > 1 else f"{ranks}{how}"
        message = f"`{TRAIN_KEY}` {train} is no multiple of {parts}"
        raise ConfigError(place + message, hint=_nearest(train, None, steps, ranks))
    return BatchSizes(train, train // (steps * ranks), steps)


def _require_positive(train: int | None, micro: int | None, steps: int | None, place: str) -> None:
    problems = [
        Problem(f"{place}`{key}` is {value}; expected a whole number of at least 1")
        for key, value in ((TRAIN_KEY, train), (MICRO_KEY, micro), (STEPS_KEY, steps))
        if value is not None and value < 1
    ]
    if problems:
        first, *rest = problems
        raise ConfigError(first.message, more=rest)


def _nearest(train: int, micro: int | None, steps: int | None, ranks: int) -> str:
    """Names the triple that fits and changes the given values least, by the ratio of old to new.

    Candidates keep the micro batch and move the train batch, or keep the train batch and move the micro batch.
    """
    wanted_micro = micro or max(1, round(train / (ranks * (steps or 1))))
    wanted_steps = steps or max(1, round(train / (ranks * wanted_micro)))
    candidates = {BatchSizes(wanted_micro * wanted_steps * ranks, wanted_micro, wanted_steps)}
    exact = train / (ranks * wanted_micro)
    for count in (math.floor(exact), math.ceil(exact)):
        if count >= 1:
            candidates.add(BatchSizes(count * wanted_micro * ranks, wanted_micro, count))
    if train % ranks == 0:
        per_rank = train // ranks
        divisors = [size for size in range(1, min(per_rank, 100_000) + 1) if per_rank % size == 0]
        candidates.update(BatchSizes(train, size, per_rank // size) for size in divisors)

    def change(sizes: BatchSizes) -> tuple[float, float]:
        moved = abs(math.log(sizes.train_batch_size / train)) + abs(math.log(sizes.micro_batch / wanted_micro))
        moved += abs(math.log(sizes.accumulation_steps / steps)) if steps else 0.0
        # Equal changes: keep the micro batch, for memory was chosen by it.
        return round(moved, 9), abs(math.log(sizes.micro_batch / wanted_micro))

    best = min(candidates, key=change)
    return (
        f"nearest that fits: `{TRAIN_KEY}` {best.train_batch_size} = micro batch {best.micro_batch}"
        f" x accumulation {best.accumulation_steps} x data-parallel size {ranks}"
    )
