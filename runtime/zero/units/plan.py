"""Which parts of the training state are sharded: the only code of the runtime that knows ZeRO's stage numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZeroPlan:
    """What a rank keeps one slice of, and what it keeps whole.

    Attributes:
        shard_optimizer: master weights, optimizer states and accumulated gradients.
        shard_gradients: gradients between backward and their reduction: a few slots instead of one buffer a unit.
        shard_parameters: parameters between uses: a few slots instead of one buffer a unit.

    Source: ZeRO (Rajbhandari et al., 2020), section 5: P_os, P_os+g, P_os+g+p.
    """

    shard_optimizer: bool
    shard_gradients: bool
    shard_parameters: bool

    @classmethod
    def of_stage(cls, stage: int) -> ZeroPlan:
        """Returns the plan of `zero_optimization.stage` 0, 1, 2 or 3."""
        assert stage in (0, 1, 2, 3), f"stage {stage} was not checked by the config"
        return cls(shard_optimizer=stage >= 1, shard_gradients=stage >= 2, shard_parameters=stage >= 3)
