"""Which packages the check needs, which of them a machine lacks, and which wheels of a folder would fill the gap.

What is needed stands in pyproject.toml: dsrun's dependencies and the tools of its tests. Nothing is installed here:
see `bundle.py`.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    # pytest brings `packaging`; pip, without which nothing can be installed, has one of its own.
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
#: Tools of the tests without which the proofs do not run, or whole files of them do not.
_TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package in a file.

    Attributes:
        path: the file.
        name: name of the package, in lower case with hyphens.
        version: version of the package.
        needs: its requirements, markers and all.
    """

    path: Path
    name: str
    version: str
    needs: tuple[str, ...]


def dependencies() -> list[str]:
    """Returns dsrun's dependencies, with their bounds."""
    return list(_project()["dependencies"])


def tools_of_tests() -> list[str]:
    """Returns what the proofs need beside them, with bounds."""
    wanted: list[str] = _project()["optional-dependencies"]["test"]
    return [one for one in wanted if name_of(one) in _TEST_TOOLS]


def missing() -> list[str]:
    """Returns dsrun's dependencies that this interpreter does not have, or has too old, each in words."""
    found: list[str] = []
    for text in dependencies():
        version = installed_version(name_of(text))
        if version is None:
            found.append(text)
        elif not Requirement(text).specifier.contains(version, prereleases=True):
            found.append(f"{text} (here is {version})")
    return found


def installed_version(name: str) -> str | None:
    """Returns the version of a package that this interpreter has, None if it has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def choose(
    roots: Iterable[str],
    wheels: Mapping[str, Wheel],
    *,
    installed: Callable[[str], str | None],
    environment: Mapping[str, str] | None = None,
) -> tuple[list[Wheel], list[str]]:
    """Finds the wheels that a machine lacks: what it has in a version that will do stays what it uses.

    Args:
        roots: requirements to meet.
        wheels: available wheels, by the name of the package.
        installed: the version of a package that the machine has.
        environment: values of markers that differ from this interpreter's.

    Returns:
        wheels to install, and requirements that neither the machine nor a wheel meets.
    """
    chosen: dict[str, Wheel] = {}
    unmet: list[str] = []
    queue, seen = list(roots), set[str]()
    while queue:
        text = queue.pop(0)
        requirement = Requirement(text)
        if text in seen or not _applies(requirement, environment):
            continue
        seen.add(text)
        name = name_of(text)
        version = None if name in chosen else installed(name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        wheel = wheels.get(name)
        if wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            unmet.append(text)
        elif name not in chosen:
            chosen[name] = wheel
            queue += wheel.needs
    return list(chosen.values()), unmet


def wheels_in(folder: Path) -> dict[str, Wheel]:
    """Returns the wheels of a folder by name; of two versions the one whose file name sorts last."""
    return {wheel.name: wheel for wheel in map(_read, sorted(folder.glob("*.whl")))}


def name_of(requirement: str) -> str:
    """Returns the name in a requirement, in lower case with hyphens."""
    return _normal(Requirement(requirement).name)


def _read(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        inside = next(one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one))
        fields = HeaderParser().parsestr(archive.read(inside).decode())
    return Wheel(path, _normal(fields["Name"]), fields["Version"], tuple(fields.get_all("Requires-Dist", [])))


def _applies(requirement: Requirement, environment: Mapping[str, str] | None) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **(environment or {})})


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _project() -> dict[str, Any]:
    return tomllib.loads(_PYPROJECT.read_text())["project"]
