"""`deepspeed.elasticity`: the global batch that most numbers of GPUs divide without a rest. Arithmetic, nothing else.

DeepSpeed 0.18 computed it for jobs that go on with another number of GPUs, and 0.19 has dropped it; trainers still ask.
The batch is that of 0.18.3, but for two cases: see [Note: the largest batch]. dsrun itself needs none of this: its
checkpoints load on any number of ranks.

[Note: highly composite numbers] A number with more divisors than any smaller one fits more numbers of GPUs than any
smaller one does. So a batch is a micro batch, or the smallest number that all of them divide, times the largest of
these that fits.

[Note: the largest batch] Where the smallest common multiple is above `max_train_batch_size`, DeepSpeed takes it all the
same, and with it a batch that is larger than allowed. Here it is left out. Where the largest batch is smaller than the
ranks need, it returns a batch of 0. Here that is an error.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsrun.errors import InputError
from dsrun.log_on_ranks import logger

#: The section's key, and its switch.
ELASTICITY = "elasticity"
ENABLED = "enabled"
ENABLED_DEFAULT = False
#: What a scheduler that chose the GPUs has read the section from.
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
_VERSIONS = (0.1, 0.2)
#: The first DeepSpeed that had this.
_FIRST_DEEPSPEED = (0, 3, 8)
#: See [Note: highly composite numbers]; OEIS A002182.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


class ElasticityError(InputError):
    """A batch for many numbers of GPUs cannot be computed."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, switched off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The job has a number of GPUs that the batch does not fit."""


class ElasticityConfig:
    """The section `elasticity`, checked.

    Args:
        param_dict: The section.

    Attributes:
        enabled: Whether it is switched on.
        max_acceptable_batch_size: Largest global batch.
        micro_batches: Micro batches to choose from.
        min_gpus: Fewest GPUs.
        max_gpus: Most GPUs.
        model_parallel_size: GPUs that share a copy of the model.
        num_gpus_per_node: GPUs of a node.
        min_time: Minutes that a job runs at least before its GPUs change.
        version: 0.1, or 0.2, which counts in nodes.
        prefer_larger_batch_size: Whether the larger one of two batches as good as each other is taken.
        ignore_non_elastic_batch_info: Whether batch sizes beside the section are allowed, and not read.

    Raises:
        ElasticityConfigError: A value is missing or wrong.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        self.enabled: bool = param_dict.get(ENABLED, ENABLED_DEFAULT)
        missing = [key for key in ("max_train_batch_size", "micro_batch_sizes") if key not in param_dict]
        if self.enabled and missing:
            raise ElasticityConfigError(f"`{ELASTICITY}.{missing[0]}` is missing", hint="an elastic batch needs it")
        self.max_acceptable_batch_size: int = param_dict.get("max_train_batch_size", 2000)
        self.micro_batches = _micro_batches(param_dict.get("micro_batch_sizes", [2, 4, 6]))
        self.min_gpus = _positive(param_dict, "min_gpus", 1)
        self.max_gpus = _positive(param_dict, "max_gpus", 10000)
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(
                f"`{ELASTICITY}.min_gpus` is {self.min_gpus} and `max_gpus` {self.max_gpus}", hint="swap them"
            )
        self.model_parallel_size = _positive(param_dict, "model_parallel_size", 1)
        self.num_gpus_per_node = _positive(param_dict, "num_gpus_per_node", 1)
        self.min_time: int = param_dict.get("min_time", 0)
        if self.min_time < 0:
            raise ElasticityConfigError(f"`{ELASTICITY}.min_time` is {self.min_time}", hint="0 or more minutes")
        self.version = float(param_dict.get("version", _VERSIONS[-1]))
        self.prefer_larger_batch_size: bool = param_dict.get("prefer_larger_batch", True)
        self.ignore_non_elastic_batch_info: bool = param_dict.get("ignore_non_elastic_batch_info", False)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether a config has the section, switched on.

    Args:
        ds_config: Config.
    """
    return bool(ds_config.get(ELASTICITY, {}).get(ENABLED, ENABLED_DEFAULT))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Computes the global batch of a config's section `elasticity`.

    Args:
        ds_config: Config.
        target_deepspeed_version: Version of the DeepSpeed that runs the job.
        world_size: Ranks of the job; 0: not known yet, or for version 0.2 what WORLD_SIZE says.
        return_microbatch: Whether the micro batch is wanted without `world_size` too.

    Returns:
        the global batch, the numbers of data-parallel ranks that it fits, and with `world_size` or `return_microbatch`
        the micro batch.

    Raises:
        ElasticityConfigError: The section is missing, switched off or wrong.
        ElasticityIncompatibleWorldSize: The batch does not fit the number of ranks.
        ElasticityError: DeepSpeed is too old, or a node's GPUs do not divide.
    """
    section = _section(ds_config)
    config = ElasticityConfig(section)
    _check_versions(config, target_deepspeed_version)
    ranks = world_size or _ranks_of_job(required=config.version == 0.2 or return_microbatch)
    if config.version == 0.1:
        batch, fitting = _batch_for_ranks(
            config.micro_batches,
            config.max_acceptable_batch_size,
            range(config.min_gpus, config.max_gpus + 1),
            larger=config.prefer_larger_batch_size,
        )
        candidate = _largest(config.micro_batches, batch, ranks) if ranks else None
    else:
        batch, fitting, candidate = _batch_for_nodes(config, ranks)
    if world_size > 0:
        if world_size not in fitting:
            raise ElasticityIncompatibleWorldSize(
                f"a batch of {batch} does not fit {world_size} ranks; it fits {', '.join(map(str, fitting))}",
                hint=f"use such a number, or other `{ELASTICITY}.micro_batch_sizes`",
            )
        candidate = _largest(config.micro_batches, batch, world_size)
    elif not return_microbatch:
        return batch, fitting
    if candidate is None:
        raise ElasticityIncompatibleWorldSize(
            f"no micro batch of {config.micro_batches} divides a batch of {batch} on {ranks} ranks",
            hint=f"add a smaller one to `{ELASTICITY}.micro_batch_sizes`",
        )
    return batch, fitting, candidate


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compares the section with what a scheduler that chose the GPUs has read, by DEEPSPEED_ELASTICITY_CONFIG.

    Args:
        runtime_elastic_config_dict: The section.

    Raises:
        ElasticityConfigError: They differ.
    """
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        logger.warning("%s is not set: nobody knows what chose the GPUs of this job", DEEPSPEED_ELASTICITY_CONFIG)
        return
    theirs, ours = ElasticityConfig(json.loads(text)), ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ElasticityConfigError(
                f"`{ELASTICITY}`: {name} is {getattr(ours, name)}, and {getattr(theirs, name)} for who chose the GPUs",
                hint=f"{DEEPSPEED_ELASTICITY_CONFIG} and the config have to agree",
            )


def _section(ds_config: object) -> Mapping[str, Any]:
    if not isinstance(ds_config, Mapping):
        raise ElasticityConfigError(
            f"compute_elastic_config: ds_config is {ds_config!r}", hint="give the config's dict"
        )
    config: Mapping[str, Any] = ds_config
    if ELASTICITY not in config:
        raise ElasticityConfigError(f"the config has no section `{ELASTICITY}`", hint="add it, or do not ask for one")
    if not elasticity_enabled(config):
        raise ElasticityConfigError(f"`{ELASTICITY}.{ENABLED}` is false", hint="set it to true")
    return config[ELASTICITY]


def _check_versions(config: ElasticityConfig, deepspeed: str) -> None:
    if config.version not in _VERSIONS:
        raise ElasticityConfigError(f"`{ELASTICITY}.version` is {config.version}", hint="0.1 and 0.2 are known")
    if config.version == 0.1 and config.model_parallel_size > 1:
        raise ElasticityConfigError(
            f"`{ELASTICITY}.model_parallel_size` is {config.model_parallel_size}, and `version` 0.1",
            hint="version 0.2 has it",
        )
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", deepspeed)
    if match is None or tuple(int(part or 0) for part in match.groups()) < _FIRST_DEEPSPEED:
        first = ".".join(map(str, _FIRST_DEEPSPEED))
        raise ElasticityError(f"DeepSpeed {deepspeed} has no elastic batches", hint=f"{first} was the first that had")


def _ranks_of_job(*, required: bool) -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if text.isdecimal():
        return int(text)
    if required:
        raise ElasticityConfigError(
            f"the number of ranks is not known: WORLD_SIZE is {text!r}", hint="give `world_size`, or set WORLD_SIZE"
        )
    return 0


def _batch_for_ranks(
    micro_batches: Sequence[int], largest: int, ranks: range, *, larger: bool
) -> tuple[int, list[int]]:
    """Returns the batch that fits most numbers of ranks in a range, and those."""
    if max(micro_batches) > largest:
        raise ElasticityConfigError(
            f"`{ELASTICITY}.micro_batch_sizes` has {max(micro_batches)}, above `max_train_batch_size` {largest}",
            hint="leave it out, or allow a larger batch",
        )
    bases = {base for base in (*micro_batches, math.lcm(*micro_batches)) if base <= largest}
    batches = {base * _HIGHLY_COMPOSITE[bisect.bisect(_HIGHLY_COMPOSITE, largest // base) - 1] for base in bases}
    fitting = {batch: _fitting(batch, micro_batches, ranks) for batch in batches}
    best = max(batches, key=lambda batch: (len(fitting[batch]), batch if larger else -batch))
    return best, fitting[best]


def _fitting(batch: int, micro_batches: Sequence[int], ranks: range) -> list[int]:
    """Returns the numbers of ranks on which micro batches add up to a batch without a rest."""
    steps = [batch // micro_batch for micro_batch in set(micro_batches) if batch % micro_batch == 0]
    divisors = {
        divisor
        for step in steps
        for low in range(1, math.isqrt(step) + 1)
        if step % low == 0
        for divisor in (low, step // low)
    }
    return sorted(divisor for divisor in divisors if divisor in ranks)


def _batch_for_nodes(config: ElasticityConfig, ranks: int) -> tuple[int, list[int], int | None]:
    """Returns the batch that fits most numbers of nodes, the data-parallel ranks of those, and a micro batch."""
    per_node = config.num_gpus_per_node
    if per_node % config.model_parallel_size:
        raise ElasticityError(
            f"`{ELASTICITY}.num_gpus_per_node` {per_node} is no multiple of `model_parallel_size` "
            f"{config.model_parallel_size}",
            hint="a copy of the model lies on the GPUs of one node",
        )
    data_per_node = per_node // config.model_parallel_size
    largest = config.max_acceptable_batch_size // data_per_node
    most = config.max_gpus // per_node or largest // min(config.micro_batches)
    batch, nodes = _batch_for_ranks(
        config.micro_batches,
        largest,
        range(max(1, config.min_gpus // per_node), most + 1),
        larger=config.prefer_larger_batch_size,
    )
    batch *= data_per_node
    fitting = [count * data_per_node for count in nodes]
    if ranks // config.model_parallel_size not in fitting:
        # The job's own number of nodes, whatever others would fit.
        size = ranks * data_per_node / per_node
        batches = [
            math.floor(config.max_acceptable_batch_size / (each * size)) * each * size for each in config.micro_batches
        ]
        batch = int(max(batches) if config.prefer_larger_batch_size else min(batches))
        fitting = [int(size)]
        if batch == 0:
            raise ElasticityIncompatibleWorldSize(
                f"a batch of at most {config.max_acceptable_batch_size} is too small for {ranks} ranks with micro "
                f"batches of {config.micro_batches}",
                hint=f"raise `{ELASTICITY}.max_train_batch_size`, or use fewer ranks",
            )
    dividing = [each for each in config.micro_batches if batch // ranks % each == 0]
    if not dividing:
        return batch, fitting, None
    return batch, fitting, max(dividing) if config.prefer_larger_batch_size else dividing[0]


def _largest(micro_batches: Sequence[int], batch: int, ranks: int) -> int | None:
    return max((each for each in micro_batches if batch // ranks % each == 0), default=None)


def _micro_batches(value: object) -> list[int]:
    values: list[object] = list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType]  # of any kind
    numbers = [number for number in values if isinstance(number, int) and number > 0]
    if not numbers or len(numbers) != len(values):
        raise ElasticityConfigError(
            f"`{ELASTICITY}.micro_batch_sizes` is {value!r}", hint="give a list of whole numbers above 0"
        )
    return numbers


def _positive(section: Mapping[str, Any], key: str, default: int) -> int:
    value = section.get(key, default)
    if value < 1:
        raise ElasticityConfigError(f"`{ELASTICITY}.{key}` is {value}", hint="give 1 or more")
    return value
