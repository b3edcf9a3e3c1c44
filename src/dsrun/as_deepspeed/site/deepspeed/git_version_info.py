"""deepspeed.git_version_info: the version that dsrun stands for."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.as_deepspeed.version_names": ["git_branch", "git_hash", "installed_ops", "version"]}
)
