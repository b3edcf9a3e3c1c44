"""What `engine.memory_report()` returns: one rank's memory as values, as text and as a picture. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsrun.memory_use.findings import Fragmentation, Growth, Peak, fragmentation_of, peak_of
from dsrun.memory_use.plot import save_plot
from dsrun.memory_use.samples import MemorySample
from dsrun.memory_use.text import report_lines, tiers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """One rank's memory.

    Attributes:
        samples: moments of a few steps, in order of time; of steps 1, 2, 3, 10, 100 and so on.
        growths: newest judgement of each tier over 50 steps; empty before step 60.
        state_predicted_bytes: model state between steps, as predicted.
        state_bytes: model state that is held now, measured.
    """

    samples: tuple[MemorySample, ...]
    growths: tuple[Growth, ...]
    state_predicted_bytes: int
    state_bytes: int

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers that were sampled: `gpu`, `cpu`."""
        return tiers_of(self.samples)

    def peak(self, tier: str) -> Peak | None:
        """Returns the most that a tier has held and who owns it; None where it was not sampled."""
        return peak_of(self.samples, tier)

    def fragmentation(self, tier: str) -> Fragmentation | None:
        """Returns what a tier's allocator holds beside what is in use; None where it does not tell."""
        return fragmentation_of(self.samples, tier)

    def save_plot(self, path: str | Path) -> None:
        """Draws bytes by tier and kind over the last sampled step.

        Args:
            path: file to write; its ending says what (.png, .svg, .pdf).

        Raises:
            InputError: nothing was sampled yet, matplotlib is not installed, or the ending is of no picture.
        """
        save_plot(self.samples, Path(path))

    def __str__(self) -> str:
        """Returns tables and bars for a terminal, without colour."""
        return "\n".join(report_lines(self.samples, self.growths, state=(self.state_predicted_bytes, self.state_bytes)))
