"""deepspeed.checkpoint.utils: copies for torch.save."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.runtime.checkpoint.export.clones": ["clone_tensors_for_torch_save"]}
)
