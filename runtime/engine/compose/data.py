"""The data that a rank trains on: a loader of what the script has given, cut over the ranks of the role `batch`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch.utils.data import IterableDataset

from dsrun.config.batch import BatchSizes
from dsrun.config.config import Config

from ...data.drawing import in_this_thread
from ...data.loader import LoaderOptions, TrainingLoader
from ...data.stream import StreamLoader
from ...mesh.join.groups import ProcessGroupMesh
from .request import Request


@dataclass(frozen=True, slots=True)
class Data:
    """Batches of this rank.

    Attributes:
        loader: Loader of the training data; None where none was given.
        options: Options of loaders, from the config.
        batch: Micro batch, accumulation steps and their product with the ranks.
        rank: This rank among those that share the data out.
    """

    loader: TrainingLoader | StreamLoader | None
    options: LoaderOptions
    batch: BatchSizes
    rank: int


def make_data(request: Request, settings: Config, mesh: ProcessGroupMesh) -> Data:
    """Returns the batches of this rank.

    Raises:
        ModelError: the dataset has too few samples.
    """
    assert settings.batch is not None, "the config was loaded with a world size"
    options = LoaderOptions(
        end="drop" if settings.dataloader_drop_last else "carry",
        seed=settings.dataloader_seed,
        workers=settings.dataloader_num_workers,
        tell=in_this_thread(partial(request.heartbeat.beat, None)),
    )
    axis, micro_batch, dataset = mesh.batch, settings.batch.micro_batch, request.training_data
    if dataset is None:
        return Data(None, options, settings.batch, axis.rank)
    if isinstance(dataset, IterableDataset):
        loader = StreamLoader(
            dataset,
            micro_batch=micro_batch,
            rank=axis.rank,
            size=axis.size,
            collate_fn=request.collate_fn,
            options=options,
        )
        return Data(loader, options, settings.batch, axis.rank)
    loader = TrainingLoader(
        dataset,
        micro_batch=micro_batch,
        rank=axis.rank,
        size=axis.size,
        collate_fn=request.collate_fn,
        options=options,
        pin_for=mesh.device,
    )
    return Data(loader, options, settings.batch, axis.rank)
