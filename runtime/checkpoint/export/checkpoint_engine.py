"""Writers of files by the names of `deepspeed.runtime.checkpoint_engine`, for scripts. dsrun's own saves use none."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class CheckpointCommitInfo:
    """Which checkpoint files are of.

    Attributes:
        tag: name of the checkpoint.
        save_dir: folder of checkpoints.
        save_latest: whether `latest` is to name it.
    """

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """How files of a checkpoint are written and read.

    Args:
        config_params: whatever the subclass takes; None for its defaults.
    """

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a checkpoint."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Returns what a file holds."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Ends a checkpoint, and returns whether its files are there."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder, and those that it lies in."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether a data-parallel rank writes what all have alike."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written after `save` has returned."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Is told which checkpoint files are of; nothing is kept."""
        del info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Returns what was kept of that: nothing."""
        return None

    def cleanup(self) -> None:
        """Ends the writer, which has nothing to end."""
        return

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors with one memory have one in the file, so that views bring all of it along."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Files of `torch.save`.

    Reading one runs whatever its pickle says, as DeepSpeed's class does: read none that you do not trust.

    Args:
        config_params: object whose `checkpoint_config["checkpoint_serialization"]` says whether files are zip archives;
            None: they are not.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"
        self.zipfile_serialization = (
            False if config_params is None else bool(config_params.checkpoint_config["checkpoint_serialization"])
        )

    def create(self, info: CheckpointCommitInfo) -> None:
        """Does nothing: each file is a matter of its own."""

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file.

        Args:
            state_dict: content of the file.
            path: its path.

        Raises:
            OSError: the file system refuses.
        """
        torch.save(state_dict, path, _use_new_zipfile_serialization=self.zipfile_serialization)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Returns what a file holds.

        Args:
            path: its path.
            map_location: devices for its tensors, as torch.load takes them.

        Raises:
            OSError: it cannot be read.
        """
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Returns True: a file is there once `save` has returned."""
        return True
