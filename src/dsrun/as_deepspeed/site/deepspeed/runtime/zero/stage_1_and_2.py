"""deepspeed.runtime.zero.stage_1_and_2: a class to ask by isinstance, and estimates of memory."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.optimizer_types": ["DeepSpeedZeroOptimizer"],
        "dsrun.runtime.deepspeed.estimates.memory": [
            "estimate_zero2_model_states_mem_needs",
            "estimate_zero2_model_states_mem_needs_all_cold",
            "estimate_zero2_model_states_mem_needs_all_live",
            "total_params as model_to_params",
        ],
    },
)
