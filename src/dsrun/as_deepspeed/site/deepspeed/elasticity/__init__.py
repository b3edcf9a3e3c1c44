"""deepspeed.elasticity: the global batch that most numbers of GPUs fit, as DeepSpeed 0.18 had it."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.estimates.batches": [
            "ELASTICITY",
            "ENABLED",
            "ENABLED_DEFAULT",
            "compute_elastic_config",
            "elasticity_enabled",
            "ensure_immutable_elastic_config",
        ],
    },
)
