"""deepspeed.runtime.checkpoint_engine: writers of files, for scripts."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.runtime.checkpoint.export.checkpoint_engine": ["CheckpointCommitInfo", "TorchCheckpointEngine"]}
)
