"""Which trackers a config switches on, as values that launcher and ranks share. Starts none."""

from __future__ import annotations

from dsrun.config.config import Config
from dsrun.contract.monitor_records import MonitorSettings

#: Sections of trackers, in the order in which they are started.
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "mlflow", "trackio", "aim")


def enabled_monitors(config: Config) -> tuple[MonitorSettings, ...]:
    """Returns the trackers that are switched on, with their secrets.

    Args:
        config: The checked config.
    """
    sections = {name: getattr(config, name) for name in MONITORS}
    return tuple(
        MonitorSettings(
            name=name, options=section.model_dump(exclude={"enabled"}), with_timers=config.wall_clock_breakdown
        )
        for name, section in sections.items()
        if section.enabled
    )
