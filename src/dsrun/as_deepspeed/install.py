"""`import dsrun.as_deepspeed.install`, in a notebook before all else, has `import deepspeed` give dsrun from there on.

The import is the whole of it; `search_path.install` is what it does.
"""

from __future__ import annotations

from .search_path import install

install()
