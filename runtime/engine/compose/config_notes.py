"""What became of a config that a program made, said once for the whole job. Reads and changes no config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsrun.config.config import Config
from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import stands_for_deepspeed

#: Lines that this process has said: a job of several engines mostly gives all of them the same config.
_SAID: set[str] = set()


def tell_program_config(source: ConfigSource, settings: Config, say: Callable[[str], None]) -> None:
    """Says each finding about a dict that a program made for DeepSpeed, a line each; a file was checked at the launch.

    Args:
        source: the config as it was given.
        settings: the checked config that was made of it.
        say: function that prints a line once for the whole job.
    """
    if not (stands_for_deepspeed() and isinstance(source, Mapping)):
        return
    for finding in settings.findings:
        line = f"dsrun: config: {finding.message}" + (f" ({finding.hint})" if finding.hint else "")
        if line not in _SAID:
            _SAID.add(line)
            say(line)
