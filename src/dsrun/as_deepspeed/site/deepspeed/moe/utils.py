"""deepspeed.moe.utils: which parameters are experts."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.experts": [
            "has_moe_layers",
            "is_moe_param",
            "is_moe_param_group",
            "split_params_into_different_moe_groups_for_optimizer",
            "split_params_into_shared_and_expert_params",
        ]
    },
)
