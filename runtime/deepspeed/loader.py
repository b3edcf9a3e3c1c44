"""`DeepSpeedDataLoader`, for scripts that make one. dsrun's own loader is in `runtime/data/loader.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from dsrun.errors import ModelError

from ..accelerator import get_accelerator

_NO_CONFIG: Mapping[str, Any] = {}


class DeepSpeedDataLoader:
    """Batches of a dataset, shared out over the ranks; iterating over it begins an epoch.

    Its place is in no checkpoint, and as in DeepSpeed each epoch has the same order unless a script calls
    `data_sampler.set_epoch`.

    Args:
        dataset: map-style dataset, the same on every rank.
        batch_size: samples of a batch of one rank.
        pin_memory: whether batches are made in page-locked memory.
        local_rank: this process's rank on its host; below 0, the process alone serves all devices that it has.
        tput_timer: timer that is started before each batch; None: none.
        collate_fn: function that makes a batch of samples; None: torch's.
        num_local_io_workers: processes that make batches; None: two for each device.
        data_sampler: sampler that says which samples; None: one that shuffles, and gives each rank its own.
        data_parallel_world_size: ranks that share the data; None: all.
        data_parallel_rank: this rank among them; None: its rank.
        dataloader_drop_last: leave out a last batch that is not full.
        deepspeed_dataloader_config: DeepSpeed's settings for curriculum learning; empty or None for none.

    Raises:
        ModelError: curriculum learning is asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or _NO_CONFIG).get("curriculum_learning"):
            raise ModelError(
                "DeepSpeedDataLoader: `curriculum_learning` is set; the loader has no curriculum",
                hint="pass a `data_sampler` that has the order",
            )
        self.device_count = 1 if local_rank >= 0 else get_accelerator().device_count()
        if data_sampler is None and local_rank >= 0:
            data_sampler = DistributedSampler(dataset, num_replicas=data_parallel_world_size, rank=data_parallel_rank)
        self.dataset = dataset
        self.data_sampler: Any = RandomSampler(cast(Sized, dataset)) if data_sampler is None else data_sampler
        self.batch_size = batch_size * self.device_count
        self.pin_memory = pin_memory
        self.tput_timer = tput_timer
        self.collate_fn = collate_fn
        self.num_local_io_workers = 2 * self.device_count if num_local_io_workers is None else num_local_io_workers
        self.dataloader_drop_last = dataloader_drop_last
        self.dataloader: DataLoader[Any] | None = None
        self.data: Iterator[Any] | None = None

    def __iter__(self) -> DeepSpeedDataLoader:
        """Begins an epoch."""
        self.dataloader = DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            pin_memory=self.pin_memory,
            sampler=self.data_sampler,
            num_workers=self.num_local_io_workers,
            collate_fn=self.collate_fn,
            drop_last=self.dataloader_drop_last,
        )
        self.data = iter(self.dataloader)
        return self

    def __len__(self) -> int:
        """Returns the batches of an epoch on this rank."""
        whole, rest = divmod(len(self.data_sampler), self.batch_size)
        return whole + (rest > 0 and not self.dataloader_drop_last)

    def __next__(self) -> Any:
        """Returns the next batch."""
        if self.data is None:
            raise ModelError("DeepSpeedDataLoader: no epoch has begun", hint="iterate over it, or call iter() first")
        if self.tput_timer:
            self.tput_timer.start()
        return next(self.data)
