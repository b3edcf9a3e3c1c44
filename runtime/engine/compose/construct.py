"""`zero.Init`: a script builds its model inside, and each rank keeps only its slices. See `creation/construct.py`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dsrun.config.axes import axes_of, misfit
from dsrun.config.config import Config
from dsrun.config.findings import Report
from dsrun.config.load import inspect_tree
from dsrun.config.programs import rewrite_program_forms
from dsrun.config.text.source import ConfigSource, read_source
from dsrun.config.text.tree import Node
from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import InputError

from ...mesh.join.gpus import choose_device
from ...mesh.join.groups import make_mesh, present_backend
from ...zero.access.state_dicts import watch_state_dicts
from ...zero.creation.construct import ConstructionBySlices
from ...zero.creation.unbuilt import UnbuiltParameters
from .distributed import join_job


class Init:
    """A context in which models are built whose parameters lie sharded over the ranks from the start.

    Joins the job if that has not happened. Every rank must build the same modules. Values are those of an ordinary
    construction, bit for bit, and rank 0's on every rank. May be nested. `dsrun.initialize` takes the model at any
    stage.

    Args:
        module: a model that exists already, to be cut at once.
        data_parallel_group: process group of DeepSpeed's call, refused unless None: all ranks of the job share a model.
        mem_efficient_linear: DeepSpeed's argument of this name; no effect here.
        remote_device: "cpu": slices lie in host memory from the start, as where the config's `offload_param` says so;
            not taken but that, None and "none".
        pin_memory: DeepSpeed's argument of this name; no effect here.
        config_dict_or_path: the training config; where its stage is not 3, every rank will hold all parameters, and
            they are built as always. Only its stage, `offload_param` and the axes of ranks are read: values that
            `"auto"` leaves to the script may be open yet.
        config: another name of it.
        enabled: False: nothing happens.
        dtype: dtype that floating-point parameters are kept in; None: the dtype they are built in.
        mpu: Megatron's object of process groups; refused unless None.

    Raises:
        InputError: an argument that is not taken.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ConfigSource | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
    ) -> None:
        del mem_efficient_linear, pin_memory
        given = {"data_parallel_group": data_parallel_group, "mpu": mpu}
        given["remote_device"] = None if remote_device in ("none", "cpu") else remote_device
        for name, value in given.items():
            if value is not None:
                raise InputError(f"dsrun.zero.Init: {name} is given, which is not supported", hint=f"leave {name} out")
        source = config_dict_or_path if config_dict_or_path is not None else config
        root, label = (None, "") if source is None else read_source(source)
        given = source if isinstance(source, Mapping) else None
        as_deepspeed = stands_for_deepspeed()
        if root is not None and given is not None and as_deepspeed:
            rewrite_program_forms(root, Config, Report())  # `initialize` says what that changes
        zero = {} if root is None else _zero_section(root)
        self._enabled = enabled and (root is None or zero.get("stage") == 3)
        offload: Any = zero.get("offload_param")
        leaves = isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme")
        self._on_host = leaves or remote_device == "cpu"
        self._dtype = dtype
        # What is wrong with it, `dsrun.initialize` says; it is not even looked at where nothing is cut.
        inspected = None
        if self._enabled and root is not None:
            inspected = inspect_tree(root, label, as_deepspeed=as_deepspeed, given=given).config
        self._settings = inspected or Config()
        self._stack = ExitStack()
        if module is not None and self._enabled:
            self._nursery().take(module.named_parameters())
            watch_state_dicts(module)

    def __enter__(self) -> Init:
        if self._enabled:
            self._stack.enter_context(ConstructionBySlices(self._nursery()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _nursery(self) -> UnbuiltParameters:
        info = join_job()
        device = choose_device(present_backend(), info)
        # That the axes do not divide the ranks is for `dsrun.initialize` to say too, with all else that is wrong.
        settings = self._settings if misfit(self._settings, info.world_size) is None else Config()
        mesh = make_mesh(axes_of(settings, info.world_size), info, device=device)
        return UnbuiltParameters(mesh.replicas(), device=mesh.device, dtype=self._dtype, on_host=self._on_host)


def _zero_section(root: Node) -> Mapping[str, Any]:
    """Returns what a config says of ZeRO; what else is in it, and what is wrong with it, `dsrun.initialize` says."""
    raw = root.plain()
    section = raw.get("zero_optimization") if isinstance(raw, dict) else None
    return section if isinstance(section, dict) else {}
