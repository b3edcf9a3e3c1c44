"""The config that `dsrun plan --fit` prints: the fastest that fits, in the words of a config that the user has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dsrun.config.config import Config
from dsrun.config.load import inspect
from dsrun.errors import UsageError
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.changes import Choice, Free
from dsrun.estimate.search.fastest import fastest

from .config_changes import format_value, with_choice
from .text import floor_text, taken_speeds_text, verdict


def fitted_config(
    config: Config,
    model: ModelSize,
    settings: RunSettings,
    machine: Machine,
    *,
    free: Collection[Free],
    axes: Mapping[str, int],
) -> tuple[dict[str, Any], str]:
    """Returns the config with the fastest settings that fit and that its own rules take, and a line on these.

    Args:
        config: the config.
        model: the model.
        settings: settings of the config; where it says the samples of an update, of one sample a rank.
        machine: machine to train on.
        free: parts of the settings that may differ.
        axes: sizes by letter that were given; of these data ranks, `d`, and micro batches, `m`, follow from others.

    Raises:
        UsageError: nothing fits, or the config asks for what this version does not build.
    """
    if machine.ranks % axes.get("d", 1):
        raise UsageError(
            f"`--axes` says d{axes['d']}; {machine.ranks} ranks do not divide by {axes['d']}",
            hint="leave d out, or use a divisor of the ranks",
        )
    blocked = [key for key in settings.planned if ".offload_" not in key]
    if blocked:
        raise UsageError(
            f"the config asks for {', '.join(f'`{key}`' for key in blocked)}, which this version does not build yet",
            hint="leave that out, or see with `--what-if` what it would need",
        )

    def accepts(chosen: RunSettings) -> bool:
        found = {"d": chosen.ranks_of("batch", machine.ranks), "m": chosen.accumulation_steps}
        if any(axes.get(letter, size) != size for letter, size in found.items()):
            return False
        return inspect(_document(config, chosen, settings), world_size=machine.ranks).config is not None

    samples = config.train_batch_size
    if samples is not None:
        free = {*free, "batch"}  # samples of a micro batch follow from those of an update
    elif {"d", "m"} <= axes.keys():
        samples = settings.micro_batch * axes["d"] * axes["m"]
    choice = fastest(model, settings, machine, free=free, accepts=accepts, samples=samples)
    if choice is None:
        raise _nothing_fits(fastest(model, settings, machine, free=free, samples=samples))
    return _document(config, choice.prediction.settings, settings), _told(choice, config, settings, axes)


def _document(config: Config, chosen: RunSettings, asked: RunSettings) -> dict[str, Any]:
    document = with_choice(config.raw, chosen, asked)
    if config.train_batch_size is None:
        document.pop("train_batch_size", None)
    return document


def _told(choice: Choice, config: Config, asked: RunSettings, axes: Mapping[str, int]) -> str:
    """Returns a line that says whether it fits, its time, and what differs from the config."""
    prediction, chosen = choice.prediction, choice.prediction.settings
    changed = ", ".join(f"`{key}` {format_value(value)}" for key, value in choice.changes) or "nothing to change"
    if chosen.stages > 1 and (chosen.stages != asked.stages or "p" in axes):
        changed += "; the script trains with `engine.train_batch`"
    time = f"{floor_text(prediction)}{taken_speeds_text(prediction)}"
    return f"{verdict(prediction)}{_by_script(config, chosen, asked)}{time}; {changed}"


def _by_script(config: Config, chosen: RunSettings, asked: RunSettings) -> str:
    """Returns who recomputes blocks, where no section of the config has them recomputed."""
    interval = config.pipeline.activation_checkpoint_interval
    said = interval or config.activation_checkpointing.chosen_policy not in ("none", "compiler")
    is_asked = (chosen.recompute, chosen.policy) == (asked.recompute, asked.policy)
    return ", where the script recomputes its blocks" if chosen.recompute == "blocks" and is_asked and not said else ""


def _nothing_fits(unsaid: Choice | None) -> UsageError:
    """Says that nothing fits, or what the config lacks for that which would; `unsaid` is what it cannot say."""
    found = None if unsaid is None else unsaid.prediction.settings
    if found is not None and "nvme" in (found.offload_optimizer, found.offload_param):
        return UsageError(
            "what fits offloads to NVMe, and the config does not say where",
            hint="add `nvme_path` to `zero_optimization.offload_optimizer` and `.offload_param` of `--config FILE`",
        )
    return UsageError(
        "no layout, stage, recomputation, offload and micro batch fits",
        hint="`--what-if` shows by how much; more ranks, `--host-memory` or a shorter `--seq` help",
    )
