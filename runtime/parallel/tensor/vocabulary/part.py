"""Which tokens of a vocabulary that is cut over the tensor axis a rank has, and the mark that says so on a weight.

Whoever cuts an output layer sets the mark, and a loss finds it; nothing is cut or computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....mesh.collectives import Collectives

_MARK = "_dsrun_vocabulary"


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """This rank's tokens [start, stop) of a vocabulary.

    Attributes:
        axis: ranks of the tensor axis. Their parts follow each other in rank order, and are dealt as `styles.EVEN` is.
        start: first token.
        stop: one past the last; `start` where this rank has none.
        whole: tokens of the whole vocabulary.
        exact: whether a loss gathers the weight and has the bits of one rank, for tests; logits are then no parts.
    """

    axis: Collectives
    start: int
    stop: int
    whole: int
    exact: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that this rank has."""
        return self.stop - self.start

    def __deepcopy__(self, memo: object) -> VocabularyPart:
        """Returns the same part for a model's copy; ranks are no part of a model."""
        return self


def note_vocabulary(param: nn.Parameter, part: VocabularyPart) -> None:
    """Marks the weight or bias of an output layer as this rank's part.

    The mark stays on the object whatever memory, class or dtype it gets. Copies and views of it have none.

    Args:
        param: weight [tokens, D] or bias [tokens] with this rank's rows, or the same before it is cut.
        part: tokens that this rank has.
    """
    setattr(param, _MARK, part)


def vocabulary_of(param: Tensor) -> VocabularyPart | None:
    """Returns this rank's part of the vocabulary; None where the weight or bias is whole."""
    found: Any = getattr(param, _MARK, None)
    return found
