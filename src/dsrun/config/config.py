"""A checked config: the sections, and what is known about them. Made by `load`; never edited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import PrivateAttr

from dsrun.config.axes import assumed_sizes, axes_of, division_text
from dsrun.config.batch import MICRO_KEY, STEPS_KEY, TRAIN_KEY, BatchSizes, solve
from dsrun.config.findings import Finding
from dsrun.config.provenance import Kind, Provenance
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a config beside its values.

    Attributes:
        source: file name as given, `<inline>`, `<base64>` or `<dict>`.
        raw: the config as written, comments included; a copy where a dict was given.
        given: dict that was given, the very object; None where there was none.
        findings: warnings and notes.
        provenance: origin of each value.
        batch: batch sizes, once the number of ranks is known.
    """

    source: str = "<dict>"
    raw: dict[str, Any] = field(default_factory=dict[str, Any])
    given: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()
    provenance: Provenance = field(default_factory=lambda: Provenance({}))
    batch: BatchSizes | None = None


class Config(Training):
    """A training config, checked; sections are attributes, e.g. `config.zero_optimization.stage`."""

    _facts: Facts = PrivateAttr(default_factory=Facts)

    @property
    def facts(self) -> Facts:
        """Everything known beside the values."""
        return self._facts

    @property
    def source(self) -> str:
        """What messages call it: the file name as given, `<inline>`, `<base64>` or `<dict>`."""
        return self._facts.source

    @property
    def raw(self) -> dict[str, Any]:
        """The config as written, comments included; not to be edited."""
        return self._facts.raw

    @property
    def given(self) -> Mapping[str, Any]:
        """The very dict that was given, which its owner may edit later; `raw` where a file or text was."""
        return self.raw if self._facts.given is None else self._facts.given

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings and notes, in the order of their places."""
        return self._facts.findings

    @property
    def provenance(self) -> Provenance:
        """Where each value came from, by dotted path."""
        return self._facts.provenance

    @property
    def batch(self) -> BatchSizes | None:
        """Batch sizes; None until the number of ranks is known, or where `"auto"` leaves them to the script."""
        return self._facts.batch

    def with_world_size(self, world_size: int) -> Config:
        """Returns this config with its batch sizes solved.

        Args:
            world_size: ranks of the job.

        Raises:
            ConfigError: the axes or the batch values do not fit the number of ranks, or too few are given.
        """
        return self.with_facts(replace(self._facts, batch=self._solved(world_size)))

    def with_facts(self, facts: Facts) -> Config:
        """Returns this config with other knowledge about it."""
        copy = self.model_copy()
        copy._facts = facts
        return copy

    def batch_place(self) -> Position:
        """Place of the first batch value, or of the config where none is written."""
        places = [self.provenance[key].position for key in (TRAIN_KEY, MICRO_KEY, STEPS_KEY)]
        return next((place for place in places if place is not None), Position(self.source))

    def _solved(self, world_size: int) -> BatchSizes:
        mesh = axes_of(self, world_size)
        derivation = [division_text(mesh), assumed_sizes(self)]
        return solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_parallel_size=mesh.role_size("batch"),
            derivation=", ".join(filter(None, derivation)),
            place=f"{self.batch_place()}: ",
        )


def is_left_to_script(config: Config) -> bool:
    """Whether a batch value is `"auto"`, so that only the script can complete the triple."""
    return any(config.provenance[key].kind is Kind.AUTO for key in (TRAIN_KEY, MICRO_KEY, STEPS_KEY))
