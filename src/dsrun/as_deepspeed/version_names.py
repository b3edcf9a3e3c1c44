"""What `deepspeed` says of its version, under DeepSpeed's names. Imported by the face alone, once a process."""

from __future__ import annotations

from .version import full_version, present_version

__all__ = [
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "git_branch",
    "git_hash",
    "version",
]

__version__ = version = full_version(present_version())
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in present_version().split("."))
#: dsrun is built from no commit of DeepSpeed.
git_hash = git_branch = __git_hash__ = __git_branch__ = "[none]"
#: No operation was compiled when dsrun was installed; none ever is.
installed_ops: dict[str, bool] = {}
