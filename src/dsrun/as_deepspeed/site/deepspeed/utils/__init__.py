"""deepspeed.utils: dsrun.utils, and what else DeepSpeed has there."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.utils": ["*"],
        "dsrun.runtime.deepspeed.timers": ["instrument_w_nvtx"],
        "dsrun.runtime.deepspeed.groups": [
            *("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"),
            *("get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size"),
            *("get_tensor_model_parallel_group", "get_tensor_model_parallel_rank"),
            *("get_tensor_model_parallel_src_rank", "get_tensor_model_parallel_world_size"),
        ],
    },
)
