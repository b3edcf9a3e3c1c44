"""Folders of tags that DeepSpeed itself has saved, told by the names of their files. Opens none of these."""

from __future__ import annotations

from pathlib import Path

from .places import Place
from .tags import is_complete

#: What every tag of DeepSpeed's has, at each stage, and a universal one too.
MODEL_STATES = "*model_states.pt"
#: Names a universal checkpoint, as `latest` names one that was saved.
LATEST_UNIVERSAL_FILE = "latest_universal"


def is_deepspeed_tag(folder: Place) -> bool:
    """Whether a folder is that of a tag of DeepSpeed's, and not one of dsrun's with DeepSpeed's files beside it."""
    return isinstance(folder, Path) and any(folder.glob(MODEL_STATES)) and not is_complete(folder)
