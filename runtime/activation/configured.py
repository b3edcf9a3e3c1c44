"""DeepSpeed's functions for scripts that choose the calls to be recomputed themselves.

The one module of the package with state of the process: that is what these functions mean. A model that the config
alone switches on does not use it, but for the named generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from dsrun.config.load import load
from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import stands_for_deepspeed
from dsrun.direct_io.configured import io_settings
from dsrun.direct_io.settings import IoSettings
from dsrun.errors import InputError, ModelError

from ..mesh.c10d import collectives_over
from ..mesh.collectives import Collectives
from .choose.profile import Profile
from .keep.keeper import AsItIs
from .keep.rings import Rings
from .recompute.options import CallOptions
from .recompute.rng import RngTracker
from .recompute.script_calls import call_recomputed
from .recompute.selective import contexts_for
from .settings import check_section, keeper_of_inputs

#: The policies that say something about single calls.
_POLICIES = ("none", "every_block", "selective")


class _Process:
    """What `configure` was told in this process, and what became of it."""

    def __init__(self) -> None:
        self.tracker = RngTracker()
        self.configured = False
        self.section = ActivationCheckpointing()
        self.io = IoSettings()
        self.axis: Collectives | None = None
        self.profile: Profile | None = None
        self.options = CallOptions(AsItIs(), self.tracker)

    def use(self, section: ActivationCheckpointing, axis: Collectives | None) -> None:
        """Keeps calls from now on as `section` says; those whose backward is to come have what they began with."""
        self.section, self.axis = section, axis
        self.profile = Profile() if section.profile else None
        self.options = CallOptions(
            keeper_of_inputs(section, axis, rings=Rings(section, io=self.io, rank=_rank())),
            self.tracker,
            preserve_rng=section.preserve_rng_state,
            contexts=contexts_for(section.keep_operations) if section.policy == "selective" else None,
            synchronize=section.synchronize_checkpoint_boundary,
            observer=self.profile,
        )


_process = _Process()


def configure(
    mpu_: Any = None,
    deepspeed_config: ConfigSource | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    mpu: Any = None,
) -> None:
    """Says how `checkpoint` keeps the inputs of its calls; as DeepSpeed's function of this name.

    Args:
        mpu_: object that knows the tensor-parallel group by Megatron's `get_tensor_model_parallel_group()` or
            `get_model_parallel_group()`, which return a process group or a runtime.mesh.Collectives. Needed for
            `partition_activations`; every rank of the group must call.
        deepspeed_config: a config, whose section `activation_checkpointing` holds where an argument is None.
        partition_activations: cut kept inputs over the group.
        contiguous_checkpointing: whether to keep inputs in one buffer, which needs `num_checkpoints`; None for the
            config's value.
        num_checkpoints: inputs that are kept at once.
        checkpoint_in_cpu: whether to keep inputs in host memory; None for the config's value.
        synchronize: whether to wait for the accelerator before and after each call; None for the config's value.
        profile: gather bytes and seconds of each call, see `profile_table`.
        mpu: another name of `mpu_`.

    Raises:
        ConfigError: the config is wrong, or what is asked for does not go together.
        OffloadError: no file can be made in the config's `nvme_path`.
    """
    group = mpu_ if mpu_ is not None else mpu
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        source = dict(deepspeed_config) if isinstance(deepspeed_config, Mapping) else deepspeed_config
        config = load(source, as_deepspeed=stands_for_deepspeed())
        section = config.activation_checkpointing
        _process.io = io_settings(config.aio)
    wanted = {key: value for key, value in given.items() if value is not None}
    section = ActivationCheckpointing.model_validate({**section.model_dump(exclude_unset=True), **wanted})
    axis = None if group is None else _axis_of(group)
    source_name = "dsrun.checkpointing.configure"
    check_section(section, tensor_parallel=axis is not None, source=source_name)
    if section.policy is not None and section.policy not in _POLICIES:
        raise InputError(
            f"{source_name}: `activation_checkpointing.policy` is {section.policy!r}, which chooses among blocks of a "
            f"model; the script's own calls can have {' or '.join(repr(name) for name in _POLICIES)}",
            hint="leave the choice to dsrun.initialize, and do not call configure",
        )
    _process.use(section, axis)
    _process.configured = True


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _process.configured


def reset(*, forget: bool = False) -> None:
    """Lets go of buffers, as DeepSpeed's function of this name does between steps of changing shapes.

    Args:
        forget: whether to forget the settings of `configure`, too; not an option of DeepSpeed.
    """
    if forget:
        _process.configured = False
        _process.use(ActivationCheckpointing(), None)
    else:
        _process.use(_process.section, _process.axis)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)`, and again in backward; what it saves is not kept in between.

    As `configure` said; without it, inputs are kept as they are. Tensors may be anywhere in nested tuples, lists and
    dicts. Inside of another such call, or without gradients, it is an ordinary call.

    Returns:
        what `function` returns.

    Raises:
        ModelError: in backward, where the second run goes another way than the first one.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    return call_recomputed(name, function, args, kwargs, options=_process.options)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint`, by DeepSpeed's other name: no call here is reentrant."""
    return checkpoint(function, *args)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switches cutting over the tensor-parallel group on or off; after `configure` with a group.

    Raises:
        ConfigError: there is no tensor-parallel group.
    """
    section = _process.section.model_copy(update={"partition_activations": bool(partition_activation)})
    source = "dsrun.checkpointing.partition_activations_in_checkpoint"
    check_section(section, tensor_parallel=_process.axis is not None, source=source)
    _process.use(section, _process.axis)


def profile_table() -> str:
    """Returns bytes and seconds of the calls so far, by name; not in DeepSpeed, which logs timers.

    Raises:
        ModelError: `configure(profile=True)` was not called.
    """
    if _process.profile is None:
        raise ModelError(
            "dsrun.checkpointing.profile_table: nothing was measured",
            hint="call dsrun.checkpointing.configure(None, profile=True) before the first checkpoint",
        )
    return str(_process.profile)


def get_cuda_rng_tracker() -> RngTracker:
    """Returns the named generators: of the GPU where this process trains on one, else of the CPU."""
    return _process.tracker


def model_parallel_cuda_manual_seed(seed: int, *, tensor_rank: int = 0) -> None:
    """Seeds the default generator with `seed`, and the one named `model-parallel-rng` with seed + 2718 + tensor rank.

    Args:
        seed: the same on all ranks that shall draw the same.
        tensor_rank: rank in the tensor-parallel group; ignored where `configure` was given a group, which then tells
            the rank.
    """
    axis = _process.axis
    _process.tracker.seed_ranks(seed, tensor_rank=tensor_rank if axis is None else axis.rank)


def named_generators() -> RngTracker:
    """Returns the named generators, for blocks that the config alone switches on."""
    return _process.tracker


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _axis_of(mpu: Any) -> Collectives:
    names = ("get_tensor_model_parallel_group", "get_model_parallel_group")
    getter = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    if getter is None:
        raise InputError(
            f"dsrun.checkpointing.configure: mpu is a {type(mpu).__name__} without {' or '.join(names)}",
            hint="pass the object that Megatron calls mpu, or None",
        )
    group = getter()
    if isinstance(group, dist.ProcessGroup):
        return collectives_over(group)
    return group
