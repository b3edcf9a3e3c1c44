"""The optimizers: one row each, of all that is known of one without torch.

From here come the types and parameters of the config, the states that a plan counts, which ones run on flat ranges,
and what a checkpoint of DeepSpeed's is imported as. `dsrun.runtime.optim.registry` has, by the same names, how one is
made. [Note: elementwise] there says what that word means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.config.sections.optimizer_params import (
    AdadeltaParams,
    AdafactorParams,
    AdagradParams,
    Adam8bitParams,
    AdamaxParams,
    AdamMiniParams,
    AdamParams,
    AdamW8bitParams,
    LambParams,
    Lion8bitParams,
    LionParams,
    MuonParams,
    NAdamParams,
    OptimizerParams,
    RAdamParams,
    RmspropParams,
    SgdParams,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """What is known of an optimizer without torch.

    Attributes:
        names: Types of the config that stand for it, its own name first; the others are names of DeepSpeed's.
        params: Model of `optimizer.params`; None where the config does not build it and a script may.
        states: Values of state for each element of a matrix, counted in fp32; see docs/guides/optimizers.md.
        further_states: Parameters that cost one more value for each element where they are set.
        is_elementwise: Whether an update of an element reads that element alone, so that leaves step one by one.
        states_decay: Whether all states are means that decay, so that rounding them once a step is forgotten too.
        plain: Elementwise optimizer whose states it keeps in fewer bits.
        imported_as: Class that takes the states of a run of DeepSpeed's with one of `names`; None where none can.
    """

    names: tuple[str, ...]
    params: type[OptimizerParams] | None
    states: float
    further_states: tuple[str, ...] = ()
    is_elementwise: bool = True
    states_decay: bool = False
    plain: str | None = None
    imported_as: str | None = None

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    def states_with(self, options: Mapping[str, Any]) -> float:
        """Returns the values of state for each element, counted in fp32.

        Args:
            options: Parameters that it runs with.
        """
        return self.states + sum(bool(options.get(name)) for name in self.further_states)


#: 8-bit codes, and an fp32 scale for each 256 of them.
_CODED = 0.25 + 1 / 256

OPTIMIZER_ROWS: tuple[OptimizerRow, ...] = (
    OptimizerRow(
        names=("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
        params=AdamParams,
        states=2,
        further_states=("amsgrad",),
        states_decay=True,
        imported_as="AdamW",
    ),
    OptimizerRow(
        names=("SGD",),
        params=SgdParams,
        states=0,
        further_states=("momentum",),
        states_decay=True,
        imported_as="SGD",
    ),
    # Its sums only grow: what is added is soon below their last place.
    OptimizerRow(names=("Adagrad", "DeepSpeedCPUAdagrad"), params=AdagradParams, states=1, imported_as="Adagrad"),
    OptimizerRow(names=("Lamb", "FusedLamb"), params=LambParams, states=2, is_elementwise=False, imported_as="Lamb"),
    OptimizerRow(
        names=("Lion", "FusedLion", "DeepSpeedCPULion"),
        params=LionParams,
        states=1,
        states_decay=True,
        imported_as="Lion",
    ),
    # Of matrices; the rest has two.
    OptimizerRow(
        names=("Muon", "MuonWithAuxAdam"), params=MuonParams, states=1, is_elementwise=False, imported_as="Muon"
    ),
    # Rows and columns of a matrix; tensors of one dimension keep one.
    OptimizerRow(names=("Adafactor",), params=AdafactorParams, states=0, is_elementwise=False),
    OptimizerRow(names=("AdamMini",), params=AdamMiniParams, states=1, is_elementwise=False),
    OptimizerRow(names=("Adam8bit",), params=Adam8bitParams, states=2 * _CODED, is_elementwise=False, plain="AdamW"),
    OptimizerRow(names=("AdamW8bit",), params=AdamW8bitParams, states=2 * _CODED, is_elementwise=False, plain="AdamW"),
    OptimizerRow(names=("Lion8bit",), params=Lion8bitParams, states=_CODED, is_elementwise=False, plain="Lion"),
    OptimizerRow(names=("RMSprop",), params=RmspropParams, states=1, further_states=("momentum", "centered")),
    OptimizerRow(names=("Adadelta",), params=AdadeltaParams, states=2),
    OptimizerRow(names=("Adamax",), params=AdamaxParams, states=2),
    OptimizerRow(names=("NAdam",), params=NAdamParams, states=2),
    OptimizerRow(names=("RAdam",), params=RAdamParams, states=2),
    OptimizerRow(names=("ASGD",), params=None, states=1),
    OptimizerRow(names=("Rprop",), params=None, states=2),
)

_BY_NAME: Mapping[str, OptimizerRow] = {name.lower(): row for row in OPTIMIZER_ROWS for name in row.names}


def row_of(kind: str) -> OptimizerRow:
    """Returns the row of an optimizer.

    Args:
        kind: Any of its names, in upper or lower case.

    Raises:
        KeyError: It has no row.
    """
    return _BY_NAME[kind.lower()]


def imported_class(kind: str) -> str | None:
    """Returns the class that takes the states of a run of DeepSpeed's; None where none is known.

    Args:
        kind: The `optimizer.type` of that run's config.
    """
    row = _BY_NAME.get(kind.lower())
    return None if row is None else row.imported_as
