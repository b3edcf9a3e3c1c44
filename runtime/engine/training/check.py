"""Whether an engine can train now: it is there, has an optimizer, and its state is whole and where steps need it."""

from __future__ import annotations

from dsrun.errors import ModelError

from ...zero.access.torn import TornState
from ..offload_states import OffloadedStates
from ..update import Update


class TrainingCheck:
    """Refuses calls that train while the engine cannot.

    Args:
        update: The optimizer, if there is one.
        torn: State that a failed load has left torn.
        states: States that are in host memory for a while.

    Attributes:
        has_ended: Whether the engine has been destroyed, and has left its groups of ranks.
        are_stages_apart: Whether a global batch has failed here, in which other pipeline stages may still wait for
            this one.
    """

    def __init__(self, update: Update, torn: TornState, states: OffloadedStates) -> None:
        self._update = update
        self._torn = torn
        self._states = states
        self.has_ended = False
        self.are_stages_apart = False

    def __call__(self, who: str) -> None:
        """Returns where the engine can train.

        Args:
            who: Name of the call, for the message.

        Raises:
            CheckpointError: a load has failed halfway.
            ModelError: see `check_there`; there is no optimizer, or states are in host memory.
        """
        self.check_there(who)
        self._torn.check(who)
        if self._update.optimizer is None:
            raise ModelError(
                f"{who}: the engine has no optimizer, so it evaluates only",
                hint="give dsrun.initialize an optimizer, or the config an `optimizer` section",
            )
        self._states.check_here(who)

    def check_there(self, who: str) -> None:
        """Returns where the other ranks can be asked for something.

        Args:
            who: Name of the call, for the message.

        Raises:
            ModelError: the engine has been destroyed, or its stages are not at one place.
        """
        if self.are_stages_apart:
            raise ModelError(
                f"{who}: an earlier batch has failed on this rank, and the stages are not at one place any more",
                hint="end the run, and go on from its last checkpoint",
            )
        if self.has_ended:
            raise ModelError(
                f"{who}: the engine has been destroyed, and has left the other ranks",
                hint="give the model another engine by dsrun.initialize; a Trainer that has evaluated at stage 3 "
                "before it trains is made anew",
            )
