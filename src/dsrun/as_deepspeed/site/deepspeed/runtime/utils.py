"""deepspeed.runtime.utils: small functions, norms, and tensors in parts."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.deepspeed.gradients": [
            *("CheckOverflow", "clip_grad_norm_", "clip_tensors_by_global_norm", "get_flattened_grad_norm"),
            *("get_global_norm", "get_global_norm_of_tensors", "get_grad_zeros", "get_weight_norm", "has_inf_or_nan"),
            *("is_invalid_grad_norm", "is_model_parallel_parameter"),
        ],
        "dsrun.runtime.deepspeed.memory": ["empty_cache", "get_ma_status", "memory_status", "see_memory_usage"],
        "dsrun.runtime.deepspeed.partition": [
            *("PartitionedTensor", "partition_balanced", "partition_uniform", "prefix_sum_inc"),
        ],
        "dsrun.runtime.deepspeed.tensors": [
            *("call_to_str", "copy_to_device", "ensure_directory_exists", "get_only_unique_item", "get_tensor_bytes"),
            *("move_to_device", "noop_context", "noop_decorator", "set_random_seed"),
        ],
    },
)
