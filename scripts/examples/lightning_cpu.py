"""Devices of Lightning that are CPUs, for its DeepSpeed strategies, which ask for `CUDAAccelerator`.

    Trainer(accelerator=TrainerCPU(), devices=1, num_nodes=world_size, plugins=[NodePerRank()], strategy=...)

For trying a script on a machine without a GPU. Lightning numbers the devices of a machine, and torch knows one CPU: so
each rank is a machine of its own here.
"""

from __future__ import annotations

import os

import torch
from lightning.fabric.accelerators import CUDAAccelerator as FabricCUDA
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator as TrainerCUDA


class _OneCPU:
    @staticmethod
    def parse_devices(devices: object) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "one_cpu"

    def setup_device(self, device: torch.device) -> None:
        """Has nothing to choose."""

    def setup(self, trainer: object) -> None:
        """Likewise."""

    def teardown(self) -> None:
        """Has nothing to free."""


class FabricCPU(_OneCPU, FabricCUDA):
    """For `Fabric`."""


class TrainerCPU(_OneCPU, TrainerCUDA):
    """For `Trainer`."""


class NodePerRank(TorchElasticEnvironment):
    """A machine of its own for each rank."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return int(os.environ["RANK"])
