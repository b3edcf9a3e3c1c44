"""deepspeed.runtime.zero.partition_parameters: sharded parameters. Clients set names here and set them back."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.zero": [
            "GatheredParameters",
            "Init",
            "ZeroParamStatus",
            "is_zero_param",
            "register_external_parameter",
            "unregister_external_parameter",
        ],
        "dsrun.runtime.accelerator": ["get_accelerator"],
        "dsrun.runtime.zero.creation.constructors": [
            "torch_arange as _orig_torch_arange",
            "zero_wrapper_for_fp_tensor_constructor",
        ],
    },
)
