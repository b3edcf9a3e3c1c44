"""deepspeed.runtime.zero.utils: which optimizers fit sharded states, and the error of a checkpoint."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.zero": ["is_zero_param"],
        "dsrun.runtime.deepspeed.optimizer_types": ["is_zero_supported_optimizer"],
        "dsrun.errors": ["CheckpointError as ZeRORuntimeException"],
    },
)
