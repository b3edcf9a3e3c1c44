"""Which step a rank is in, as the engine says and errors repeat it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)  # each is one of its own, and can be referred to weakly
class Where:
    """The step a rank is in: the engine keeps it up to date, errors of collectives name it. One for all axes of a rank.

    Attributes:
        step: the optimizer step under way, counted from 1; 0 before the first one.
        micro_step: the micro step of it, counted from 1.
        oddity: description of how this rank's last micro steps differ from its first one; error messages repeat it.
    """

    step: int = 0
    micro_step: int = 0
    oddity: str = ""

    def at(self, step: int, micro_step: int) -> None:
        """Says which step begins; once a micro step."""
        self.step = step
        self.micro_step = micro_step

    def __str__(self) -> str:
        return at_step(self.step, self.micro_step) + (f" ({self.oddity})" if self.oddity else "")


def at_step(step: int, micro_step: int) -> str:
    """Returns ` at step 3, micro step 1`, which ends what an error says of a rank; nothing before the first step."""
    return f" at step {step}, micro step {micro_step}" if step else ""
