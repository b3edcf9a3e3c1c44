"""deepspeed.constants: how ranks meet."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.as_deepspeed.commands.options": ["MASTER_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT"],
        "dsrun.as_deepspeed.constants": ["CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"],
    },
)
