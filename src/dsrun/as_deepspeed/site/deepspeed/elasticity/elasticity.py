"""deepspeed.elasticity.elasticity: deepspeed.elasticity."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.estimates.batches": [
            "compute_elastic_config",
            "elasticity_enabled",
            "ensure_immutable_elastic_config",
        ],
    },
)
