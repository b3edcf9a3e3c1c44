"""deepspeed.accelerator: the devices that ranks compute on."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.accelerator": [
            "get_accelerator",
            "Accelerator as DeepSpeedAccelerator",
            "is_current_accelerator_supported",
        ]
    },
)
