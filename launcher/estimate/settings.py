"""Settings of a run as plans read them: a config for a model, with what the command line says in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dsrun.config.config import Config
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.run.settings import RunSettings


def settings_of(
    config: Config,
    model: ModelSize,
    *,
    ranks: int,
    sequence: int | None = None,
    micro_batch: int | None = None,
    recompute: Literal["none", "blocks"] | None = None,
) -> RunSettings:
    """Returns the settings of a config: buckets by the model's width, samples no longer than the model takes.

    Args:
        config: the config.
        model: the model.
        ranks: ranks of the job.
        sequence: tokens of a sample; None: as many as the model takes, up to the default.
        micro_batch: samples of a forward; None: the config's.
        recompute: choice of what is computed again in backward; None: the config's.

    Raises:
        ConfigError: the ranks do not divide, or the batch sizes contradict each other.
    """
    from dsrun.config.buckets import resolve_buckets
    from dsrun.estimate.run.settings import read_settings

    longest = None
    if (shape := model.architecture) is not None:
        config = resolve_buckets(config, shape.hidden)
        longest = shape.max_positions
    return read_settings(
        config, ranks=ranks, sequence=sequence, micro_batch=micro_batch, recompute=recompute, longest=longest
    )
