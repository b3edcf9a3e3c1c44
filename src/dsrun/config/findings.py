"""What there is to say about a config: errors, warnings and notes, each with key, place and way out. Prints nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dsrun.config.text.tree import Position
from dsrun.errors import ConfigError, Problem


class Severity(Enum):
    """How much a finding matters.

    `ERROR`: the config is refused. `WARNING`: something the user wrote does nothing, or was read in another
    spelling. `NOTE`: true and harmless, but worth knowing when results are compared.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Code(Enum):
    """What kind of finding it is, for programs that read findings."""

    UNKNOWN_KEY = "unknown-key"
    TWO_NAMES = "two-names"
    BAD_VALUE = "bad-value"
    MISSING = "missing"
    AUTO = "auto"
    REMOVED = "removed"
    PLANNED = "planned"
    NO_EFFECT = "no-effect"
    OLD_SPELLING = "old-spelling"
    OTHER_KIND = "other-kind"
    COMBINATION = "combination"
    BATCH = "batch"
    DIFFERENT_DEFAULT = "different-default"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about a config.

    Attributes:
        severity: severity of the finding: error, warning or note.
        code: kind of the finding, for programs that read it.
        key: dotted path of the key, empty for the whole config.
        message: thing and value, without the place.
        hint: the way out, if one is known.
        position: place in the config that the finding is about: source, line and column.
    """

    severity: Severity
    code: Code
    key: str
    message: str
    hint: str | None
    position: Position

    @property
    def problem(self) -> Problem:
        """The finding as an error message carries it, place first."""
        if self.code is Code.UNREADABLE and not self.position.line:
            return Problem(self.message, self.hint)  # it names the source itself
        return Problem(f"{self.position}: {self.message}", self.hint)

    def render(self) -> str:
        """Returns `warning: FILE:LINE:COL: ...`, and `hint: ...` on a line of its own where there is one."""
        text = f"{self.severity.value}: {self.position}: {self.message}"
        return text if self.hint is None else f"{text}\nhint: {self.hint}"


class Report:
    """Collects findings of one config, in the order of their places."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []

    def error(self, code: Code, key: str, message: str, at: Position, hint: str | None = None) -> None:
        """Adds a reason to refuse the config."""
        self._findings.append(Finding(Severity.ERROR, code, key, message, hint, at))

    def warning(self, code: Code, key: str, message: str, at: Position, hint: str | None = None) -> None:
        """Adds something that does nothing, or was read in another spelling."""
        self._findings.append(Finding(Severity.WARNING, code, key, message, hint, at))

    def note(self, code: Code, key: str, message: str, at: Position, hint: str | None = None) -> None:
        """Adds something worth knowing."""
        self._findings.append(Finding(Severity.NOTE, code, key, message, hint, at))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, by line and column, in the order found where these are equal.

        What is refused is not said to do nothing as well.
        """
        broken = self.broken_keys
        told = [f for f in self._findings if not (f.code is Code.NO_EFFECT and f.key in broken)]
        return tuple(sorted(told, key=lambda finding: finding.position[1:]))

    @property
    def broken_keys(self) -> frozenset[str]:
        """Keys that have an error."""
        return frozenset(finding.key for finding in self._findings if finding.severity is Severity.ERROR)


def unreadable(error: ConfigError, source: str) -> tuple[Finding, ...]:
    """Makes findings of an error that came before there was a config; the place stands in front of its messages.

    Args:
        error: error that was raised when the config was read or parsed.
        source: the source as given.
    """
    findings: list[Finding] = []
    for problem in error.problems:
        place = re.match(r"(?P<source>.*?):(?P<line>\d+):(?P<column>\d+): ", problem.message)
        at, message = Position(source), problem.message
        if place is not None and place["source"] == source:
            at, message = Position(source, int(place["line"]), int(place["column"])), problem.message[place.end() :]
        findings.append(Finding(Severity.ERROR, Code.UNREADABLE, "", message, problem.hint, at))
    return tuple(findings)


def to_json(finding: Finding) -> dict[str, object]:
    """Returns the finding for CI and editors; line and column are 0 where the source has none."""
    return {
        "severity": finding.severity.value,
        "code": finding.code.value,
        "key": finding.key,
        "message": finding.message,
        "hint": finding.hint,
        "file": finding.position.source,
        "line": finding.position.line,
        "column": finding.position.column,
    }


def errors_of(findings: Sequence[Finding]) -> ConfigError | None:
    """Makes one exception of the errors among `findings`; None where there is none."""
    problems = [finding.problem for finding in findings if finding.severity is Severity.ERROR]
    if not problems:
        return None
    first, *rest = problems
    return ConfigError(first.message, hint=first.hint, more=rest)
