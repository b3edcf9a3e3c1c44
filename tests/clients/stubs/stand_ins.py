"""Lets programs start where packages are missing that they import and the tests do not reach.

Every name of such a package is a class; to make one is an error that says which package would be needed. What a
program does use of one is given here: torchdata's loader is torch's, which does not remember where it was.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

from torch.utils.data import DataLoader


def _logger(name: str = "modelscope") -> logging.Logger:
    logger = logging.getLogger(name)
    logger.addHandler(logging.StreamHandler())
    return logger


USED = {
    "modelscope.utils.logger": {"get_logger": _logger},
    "torchdata.stateful_dataloader": {"StatefulDataLoader": DataLoader},
}


#: Modules that programs reach as an attribute of their package.
MODULES = ["PIL.Image"]


class _Package(ModuleType):
    def __getattr__(self, name: str) -> type | ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")

        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name}: only a stand-in is installed here")

        made = type(name, (), {"__init__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_there = any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in self.packages)
        return spec_from_loader(name, self, is_package=True) if is_there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(USED.get(module.__name__, {}))


def install(*packages: str) -> None:
    """Stands in for these packages, or for these parts of one, in this process, where they are not installed."""
    sys.meta_path.append(_Finder(packages))
