"""Every name that docs/reference/deepspeed-api.md lists is there, or absent with the reason that the page gives."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import dsrun
from dsrun.absent import PACKAGE
from dsrun.runtime.engine.absent import ENGINE
from support.training import config, make_engine

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deepspeed-api.md"


def rows(section: str) -> list[tuple[list[str], str]]:
    """(names, remark) of each row of the table below a heading."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", first), second.strip()) for first, second in cells]


def names(section: str) -> list[str]:
    return [name for row, _ in rows(section) for name in row]


@pytest.mark.parametrize("name", names("The package"))
def test_a_name_of_the_package_is_there(name: str) -> None:
    found = reduce(getattr, name.split("."), dsrun)
    assert found is not None
    owner: Any = reduce(getattr, name.split(".")[:-1], dsrun)
    assert name.split(".")[-1] in [*dir(owner), *dir(type(owner))]


def test_every_name_of_the_engine_is_there_and_its_own() -> None:
    engine = make_engine(config(3, micro=2))
    for name in names("The engine"):
        assert name in engine.__dict__ or hasattr(type(engine), name), name


def test_names_that_are_not_there_say_what_to_use_instead_as_the_page_does() -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 3))
    listed = {name: remark for (name,), remark in rows("What is not here")}
    assert listed == {**PACKAGE, **{f"engine.{name}": reason for name, reason in ENGINE.items()}}
    for name, remark in listed.items():
        *path, last = name.split(".")
        owner: Any = engine if path == ["engine"] else reduce(getattr, path, dsrun)
        assert not hasattr(owner, last), f"{name} is there now: take it off the list"
        with pytest.raises(AttributeError, match=re.escape(remark)):
            getattr(owner, last)


def test_faces_are_modules_and_an_unknown_name_has_no_reason() -> None:
    for face in (dsrun, dsrun.zero, dsrun.utils, dsrun.comm):
        assert isinstance(face, ModuleType)
        with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'nonsense'$"):
            _ = face.nonsense
