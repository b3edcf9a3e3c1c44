"""Which keys of `activation_checkpointing` do not go together; for configs and for what scripts pass. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsrun.config.sections.activation import ActivationCheckpointing

SECTION = "activation_checkpointing"
#: Inputs that host memory must have room for on their way to a disk and back.
FEWEST_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Clash:
    """Keys that do not go together.

    Attributes:
        key: dotted path of the one to blame.
        message: key and value, and what they lack.
        hint: the way out.
    """

    key: str
    message: str
    hint: str


def clashes(section: ActivationCheckpointing, *, tensor_parallel: bool) -> Iterator[Clash]:
    """Yields what is wrong with a section whose keys are valid one by one.

    Args:
        section: the section.
        tensor_parallel: whether there are ranks that hold the same activations.
    """
    yield from _needs(section, "interval", section.interval, "4")
    yield from _needs(section, "ratio", section.ratio, "0.5")
    yield from _needs(section, "memory_budget", section.memory_budget, "8e9")
    if section.keep_operations and section.chosen_policy != "selective":
        yield _without_policy(section, "keep_operations", list(section.keep_operations), "selective")
    if _differs(section, "compiler_budget") and section.chosen_policy != "compiler":
        yield _without_policy(section, "compiler_budget", section.compiler_budget, "compiler")
    if section.blocks and section.policy is None and section.chosen_policy == "none":
        yield Clash(
            f"{SECTION}.blocks",
            f"`{SECTION}.blocks` is {list(section.blocks)} and `policy` is not set: nothing becomes of these blocks",
            'add "policy", e.g. "every_block", or leave `blocks` out',
        )
    if section.partition_activations and not tensor_parallel:
        yield Clash(
            f"{SECTION}.partition_activations",
            f"`{SECTION}.partition_activations` is true without tensor parallelism: there are no ranks that hold the "
            "same activations",
            "leave it out, or give the group yourself: dsrun.checkpointing.configure(mpu, partition_activations=True)",
        )
    if section.nvme_path and not section.cpu_checkpointing:
        yield Clash(
            f"{SECTION}.nvme_path",
            f"`{SECTION}.nvme_path` is {list(section.nvme_path)} and `cpu_checkpointing` is false: nothing leaves the "
            "device, so nothing goes on to the disk",
            'add "cpu_checkpointing": true, or leave `nvme_path` out',
        )
    if _differs(section, "nvme_buffer_count") and not section.nvme_path:
        yield Clash(
            f"{SECTION}.nvme_buffer_count",
            f"`{SECTION}.nvme_buffer_count` is {section.nvme_buffer_count} and `nvme_path` is not set: nothing is on "
            "its way to a disk",
            "add `nvme_path`, or leave `nvme_buffer_count` out",
        )
    if section.nvme_path and section.nvme_buffer_count < FEWEST_BUFFERS:
        yield Clash(
            f"{SECTION}.nvme_buffer_count",
            f"`{SECTION}.nvme_buffer_count` is {section.nvme_buffer_count}; expected {FEWEST_BUFFERS} or more: an "
            "input that is used, one that comes and one on its way to the device",
            f'write "nvme_buffer_count": {FEWEST_BUFFERS}',
        )
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        yield Clash(
            f"{SECTION}.contiguous_memory_optimization",
            f"`{SECTION}.contiguous_memory_optimization` is true and `number_checkpoints` is not set; expected the "
            "number of inputs that the buffer has room for",
            f'add "number_checkpoints": the number of blocks, as policy "{section.chosen_policy}" keeps an input each',
        )


def _needs(section: ActivationCheckpointing, name: str, value: object, example: str) -> Iterator[Clash]:
    """A policy needs the key of its own name, and no other policy reads it."""
    if section.chosen_policy == name and value is None:
        yield Clash(
            f"{SECTION}.policy",
            f'`{SECTION}.policy` is "{name}" and `{name}` is not set',
            f'add "{name}", e.g. {example}',
        )
    elif value is not None and section.chosen_policy != name:
        yield _without_policy(section, name, value, name)


def _differs(section: ActivationCheckpointing, name: str) -> bool:
    """Whether a key is not as it is by default: a config that writes every default down stays valid."""
    return getattr(section, name) != ActivationCheckpointing.model_fields[name].default


def _without_policy(section: ActivationCheckpointing, name: str, value: object, policy: str) -> Clash:
    return Clash(
        f"{SECTION}.{name}",
        f'`{SECTION}.{name}` is {value}, which only policy "{policy}" reads; the policy is "{section.chosen_policy}"',
        f'write "policy": "{policy}", or leave `{name}` out',
    )
