"""In the spawner of a job, imports with torch what the ranks' scripts import, so that it is done once for all ranks.

On the path of jobs alone that `support.clients` starts. It says in CLIENTS_PRELOADED which modules those are; every
other process of the job, and a rank that is started anew, imports what it asks for itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

_SPAWNER = "dsrun.launcher.agent.start.spawner"


def _preload(names: list[str]) -> None:
    load = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        module = load(name, package)
        if name == "torch.distributed":
            importlib.import_module = load
            for each in names:
                load(each)
        return module

    importlib.import_module = import_module


if any(_SPAWNER in word for word in sys.orig_argv):
    _preload(os.environ.get("CLIENTS_PRELOADED", "").split())
