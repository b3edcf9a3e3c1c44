"""deepspeed.runtime.dataloader: loaders."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.utils": ["RepeatingLoader"], "dsrun.runtime.deepspeed.loader": ["DeepSpeedDataLoader"]}
)
