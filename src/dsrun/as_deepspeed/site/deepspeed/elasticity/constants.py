"""deepspeed.elasticity.constants: keys and variables."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.estimates.batches": [
            "DEEPSPEED_ELASTICITY_CONFIG",
            "ELASTICITY",
            "ENABLED",
            "ENABLED_DEFAULT",
        ],
    },
)
