"""deepspeed.elasticity.config: the section elasticity, and the errors of it."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.estimates.batches": [
            "ElasticityConfig",
            "ElasticityConfigError",
            "ElasticityError",
            "ElasticityIncompatibleWorldSize",
        ],
    },
)
