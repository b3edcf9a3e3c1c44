"""The errors a user can meet, each with a way out. Nothing here prints or exits.

    DsrunError                 exit 1   our own failure, or one we cannot put down to input
    |-- InputError             exit 2   wrong arguments, config, hostfile or model: found before work is lost
    |   |-- UsageError                  the command line
    |   |-- ConfigError                 the training config
    |   |-- HostfileError               hosts and their selection
    |   `-- ModelError                  the model or the training script's use of the engine
    |-- LaunchError            exit 1   a host, agent or worker could not be started
    |   `-- PreflightError     exit 75  hosts are not fit for the job; none of it was started
    |-- LayoutError            exit 1   sizes that do not divide or boxes that do not fit
    |-- CheckpointError        exit 1   a checkpoint that cannot be written or read
    `-- OffloadError           exit 1   what was put away off the device cannot be, or is not there any more

One error may carry several problems, so that a user sees all of them at once.

[Note: what scripts catch] Scripts that were written for DeepSpeed guard calls with `except ValueError`, AssertionError
or RuntimeError, which are what its mistakes raise. So an error is also of those of python's classes by which such a
script, or one for torch alone, expects it; docs/decisions/0066 has the list. Code of dsrun that catches one of python's
classes around calls of its own lets a DsrunError pass first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `message` names thing, place and value; `hint` names the way out."""

    message: str
    hint: str | None = None

    def render(self) -> str:
        """Returns `error: ...`, and `hint: ...` on a line of its own where there is one."""
        text = f"error: {self.message}"
        return text if self.hint is None else f"{text}\nhint: {self.hint}"


class DsrunError(Exception):
    """Base of every error dsrun raises on purpose.

    `str()` is the first message alone. Where python itself shows the error, as it does under torchrun, the hint and the
    further problems stand below it as notes (from Python 3.11 on).

    Args:
        message: thing, place and value, without a full stop.
        hint: the way out, if one is known.
        more: further problems found in the same pass.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, more: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = (Problem(message, hint), *more)
        # What BaseException.add_note of Python 3.11 fills; an older one shows no notes.
        self.__notes__ = [] if hint is None else [f"hint: {hint}"]
        self.__notes__ += [problem.render() for problem in more]

    @property
    def hint(self) -> str | None:
        """The first problem's way out."""
        return self.problems[0].hint

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> DsrunError:
        """Makes one error of a non-empty list of problems."""
        first, *rest = problems
        return cls(first.message, hint=first.hint, more=rest)

    def render(self) -> str:
        """Returns every problem as `error:` and `hint:` lines."""
        return "\n".join(problem.render() for problem in self.problems)


class InputError(DsrunError, ValueError):
    """What the user gave is wrong; nothing was started or changed."""

    exit_code = 2


class UsageError(InputError):
    """The command line is wrong."""


class ConfigError(InputError, AssertionError):
    """The training config is wrong; see [Note: what scripts catch]."""


class HostfileError(InputError):
    """A hostfile, host or selection is wrong."""


class ModelError(InputError, AssertionError, RuntimeError):
    """The model, or the way the script uses the engine, cannot be trained as asked; see [Note: what scripts catch]."""


class LaunchError(DsrunError):
    """A host, agent or worker could not be started."""


class PreflightError(LaunchError):
    """Hosts are not fit for the job, found before any of it was started. The code is EX_TEMPFAIL of sysexits.h."""

    exit_code = 75


class LayoutError(DsrunError):
    """Sizes do not divide or boxes do not fit."""


class CheckpointError(DsrunError, AssertionError, RuntimeError):
    """A checkpoint cannot be written or read; see [Note: what scripts catch]."""


class OffloadError(DsrunError, RuntimeError):
    """What was put away in host memory or on a disk cannot be put there, or does not come back as it was."""
