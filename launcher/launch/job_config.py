"""Which training config a job has, and whether it trains with it on its hosts. Loads pydantic only if there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.environment import CONFIG_ENV
from dsrun.contract.monitor_records import MonitorSettings
from dsrun.errors import ConfigError, Problem

from ..plan.script_args import CONFIG_FLAG, DEEPSPEED_CONFIG_FLAG, ScriptWords

_FOR_THE_SCRIPT = "if it is meant for the script, put `--` before the script: `dsrun -- train.py --config FILE`"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What a launch has to know of its config.

    Attributes:
        path: absolute; None without a config, or where it is no file.
        warnings: warnings about the config.
        steps_on_host: the optimizer's step computes in host memory.
        open_source: path or text of a config that leaves sizes of axes to a plan; None where it leaves none.
        monitors: trackers that the config switches on, with their secrets.
    """

    path: str | None = None
    warnings: tuple[str, ...] = ()
    steps_on_host: bool = False
    open_source: str | None = None
    monitors: tuple[MonitorSettings, ...] = ()


def check_config(
    asked: str | None, words: ScriptWords, world_size: int | None, environ: Mapping[str, str]
) -> JobConfig:
    """Checks the config that a job has, if it has one.

    What the command line names comes before DSRUN_CONFIG in the environment, which ranks would find all the same.

    Args:
        asked: `--config` from before the script.
        words: words after the script, already split: the script's own, and configs named among them.
        world_size: ranks of the job, where they are known; batch sizes are checked for them.
        environ: the environment the ranks inherit.

    Raises:
        ConfigError: it cannot be read or trained with, or two are named.
    """
    ours = [value for value in (asked, words.config) if value is not None]
    theirs = words.deepspeed_config
    for other in (*ours[1:], *(() if theirs is None else (theirs,))):
        if ours and not _same_file(ours[0], other):
            flag = CONFIG_FLAG if other in ours else DEEPSPEED_CONFIG_FLAG
            raise ConfigError(
                f"`{CONFIG_FLAG} {ours[0]}` and `{flag} {other}` name different configs",
                hint="a job has one config: give one of them",
            )
    inherited = environ.get(CONFIG_ENV)
    if not ours and theirs is None:
        return _check_inherited(inherited, world_size=world_size) if inherited else JobConfig()
    if ours:
        return _load_config(Path(ours[0]), world_size=world_size, hint=_FOR_THE_SCRIPT if words.config else None)
    assert theirs is not None, "one of the two is given"
    # DeepSpeed scripts may be given the JSON itself, plain or as base64; then there is no file to pass on.
    return _load_config(theirs, world_size=world_size, hint=None)


def _check_inherited(source: str, *, world_size: int | None) -> JobConfig:
    try:
        return _load_config(source, world_size=world_size, hint=None)
    except ConfigError as error:
        whence = Problem(
            f"`{CONFIG_ENV}` in the environment is `{source[:200]}`, which is no config to train with",
            f"`unset {CONFIG_ENV}`, or name another with `{CONFIG_FLAG} FILE`",
        )
        raise ConfigError.of([*error.problems, whence]) from error


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.abspath(one) == os.path.abspath(other)


def _load_config(source: str | Path, *, world_size: int | None, hint: str | None) -> JobConfig:
    from dsrun.config.axes import open_axes
    from dsrun.config.findings import Severity, errors_of
    from dsrun.config.load import inspect
    from dsrun.config.monitors import enabled_monitors

    try:
        inspected = inspect(source, world_size=world_size)
    except ConfigError as error:
        # Unreadable altogether: it may never have been meant for dsrun.
        first, *rest = error.problems
        raise ConfigError(first.message, hint=first.hint or hint, more=rest) from error
    findings, config = inspected.findings, inspected.config
    errors = errors_of(findings)
    if errors is not None:
        raise errors
    return JobConfig(
        path=os.path.abspath(source) if os.path.exists(source) else None,
        warnings=tuple(finding.render() for finding in findings if finding.severity is Severity.WARNING),
        steps_on_host=config is not None and config.zero_optimization.offload_optimizer.device != "none",
        open_source=str(source) if config is not None and open_axes(config) else None,
        monitors=() if config is None else enabled_monitors(config),
    )
