"""How many states a drive has room for, before there is an optimizer; and what is said of a drive that is memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.config.load import load
from dsrun.direct_io.memory_folders import memory_file_system
from dsrun.runtime.engine.host.disk import foreseen_states, tell_of_drives


def settings_of(kind: str | None, **params: Any) -> Any:
    section = {} if kind is None else {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    return load({"train_micro_batch_size_per_gpu": 1, **section}, world_size=1)


@pytest.mark.parametrize(
    ("kind", "params", "count"),
    [("AdamW", {}, 2), ("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 1), ("Lion", {}, 1), ("Adam", {"amsgrad": True}, 3)],
)
def test_the_configs_optimizer_is_asked(kind: str, params: dict[str, Any], count: int) -> None:
    assert foreseen_states(settings_of(kind, **params), None) == count


def test_the_scripts_optimizer_goes_before_and_its_largest_group_counts() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "momentum": momentum} for momentum in (0.0, 0.9)]
    assert foreseen_states(settings_of("AdamW"), optim.SGD(groups, lr=0.1)) == 1


def test_a_function_that_makes_it_is_not_called() -> None:
    def make(params: Any) -> optim.Optimizer:
        raise AssertionError("there are no parameters yet")

    assert foreseen_states(settings_of(None), make) == 2


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_folder_in_memory_is_told_where_it_is_to_be_a_drive(device: str) -> None:
    sections = {
        name: {"device": device, "nvme_path": ["/dev/shm/a", "/"]} for name in ("offload_optimizer", "offload_param")
    }
    zero = {"stage": 3, **sections}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "aio": {"verify": True}}
    settings = load(config, world_size=1)
    said: list[str] = []
    tell_of_drives(settings, said.append)
    kind = memory_file_system("/dev/shm/a")
    expected = [
        f"dsrun: `zero_optimization.{name}.nvme_path`: /dev/shm/a is {kind}, memory of this host and no drive: what "
        "goes there takes RAM"
        for name in sections
    ]
    root = [line for line in said if ": / is " in line]  # of a host that runs from memory
    assert [line for line in said if line not in root] == (expected if device == "nvme" and kind else [])


@pytest.mark.parametrize(("device", "verify", "told"), [("nvme", False, 1), ("nvme", True, 0), ("cpu", False, 0)])
def test_a_line_says_that_what_a_drive_gives_back_is_not_verified(device: str, verify: bool, told: int) -> None:
    section = {"device": device, "nvme_path": "/nowhere"}
    zero = {"stage": 1, "offload_optimizer": section}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "aio": {"verify": verify}}
    said: list[str] = []
    tell_of_drives(load(config, world_size=1), said.append)
    lines = [line for line in said if "not verified" in line]
    assert len(lines) == told
    assert all("`zero_optimization.offload_optimizer.nvme_path`" in line and "`aio.verify`" in line for line in lines)
