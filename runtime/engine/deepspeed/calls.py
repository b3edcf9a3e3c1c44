"""Calls that scripts written for DeepSpeed make besides training: to compile, make a loader, drop what is gathered.

What such scripts ask stands in `getters.py`, and what they ask in vain in `missing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dsrun.config.batch import BatchSizes
from dsrun.errors import InputError

from ...data.loader import TrainingLoader
from ..parts import EngineParts

#: Routes of `deepspeed_io` whose data is looked at and not learnt from.
_EACH_SAMPLE_ONCE = ("eval", "predict")


class DeepSpeedCalls:
    """What an engine does when asked by DeepSpeed's names; no step needs it."""

    _parts: EngineParts
    _batch: BatchSizes
    _is_compiled: bool
    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward with all that goes with it, as a call of the engine does."""
        call: Any = self
        return call(*args, **kwargs)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module's forward, as its own `compile` does. Blocks compiled one by one give fewer graph breaks.

        Args:
            backend: of torch.compile.
            compile_kwargs: further arguments of torch.compile.
            schedule: not taken: there are no passes of DeepSpeed's here.
            compiled_autograd_enabled: not taken: hooks follow the backward.

        Raises:
            InputError: an argument that is not taken.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise InputError(
                f"engine.compile: schedule is {schedule} and compiled_autograd_enabled is {compiled_autograd_enabled}",
                hint="leave both out",
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str | None = None,
        pin_memory: bool = True,
        data_sampler: None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader:
        """Makes a loader of a map-style dataset, as `initialize` does of training_data; the engine does not save it.

        Args:
            dataset: the same on every rank.
            batch_size: samples of a rank in a batch; the micro batch by default.
            route: "eval" or "predict": every iteration is the whole dataset, in its own order; else as for training.
            pin_memory: make batches in page-locked memory, where the engine computes on a GPU.
            data_sampler: not taken: the loader shares samples out itself.
            collate_fn: makes a batch of samples.
            num_local_io_workers: processes that make batches ahead; `dataloader_num_workers` of the config by default.

        Raises:
            InputError: an argument that is not taken.
            ModelError: the dataset has no length, or too few samples.
        """
        if data_sampler is not None:
            raise InputError(
                "engine.deepspeed_io: data_sampler is given; the loader shares samples out over the ranks itself",
                hint="leave it out, or iterate your own DataLoader",
            )
        wishes = self._parts.loading
        only_looks = route in _EACH_SAMPLE_ONCE
        return TrainingLoader(
            dataset,
            micro_batch=batch_size or self._batch.micro_batch,
            rank=self._parts.collectives.rank,
            size=self._parts.collectives.size,
            collate_fn=collate_fn,
            wishes=replace(
                wishes,
                end="fill" if only_looks else wishes.end,
                workers=wishes.workers if num_local_io_workers is None else num_local_io_workers,
            ),
            shuffle=not only_looks,
            pin_for=self._parts.mesh.device if pin_memory else None,
        )

    def empty_partition_cache(self) -> None:
        """Does nothing: what is gathered lies in slots of a fixed size, and none of it is kept for later."""
