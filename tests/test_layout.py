"""The layout that everything else stands on: two halves at the top, linked into the package, whole in the wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
HALVES = ("launcher", "runtime")


@pytest.mark.parametrize("half", HALVES)
def test_each_half_is_linked_into_the_package(half: str) -> None:
    link = ROOT / "src" / "dsrun" / half
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", half)
    assert link.resolve() == ROOT / half
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("half", HALVES)
def test_every_folder_of_code_is_a_package(half: str) -> None:
    folders = {path.parent for path in (ROOT / half).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("top", ["launcher", "runtime", "src/dsrun"])
def test_a_package_is_seen_at_a_glance(top: str) -> None:
    """A dozen modules, fifteen at most; but for one a verb and one a section of the config."""
    tables = {ROOT / "launcher" / "commands", ROOT / "src" / "dsrun" / "config" / "sections"}
    folders = {path.parent for path in (ROOT / top).rglob("*.py")} - tables
    sizes = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert {str(folder): size for folder, size in sizes.items() if size > 15} == {}


def test_the_composition_root_fits_two_screens() -> None:
    tree = ast.parse((ROOT / "runtime" / "engine" / "initialize.py").read_text())
    (root,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "initialize")
    assert root.end_lineno is not None
    assert root.end_lineno - root.lineno + 1 <= 90


def test_tests_are_no_package_and_stay_out_of_the_import_path() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_pyright_is_told_of_the_linked_folders_which_it_would_not_enter_by_itself() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = settings["tool"]["pyright"]["include"]
    assert {"src/dsrun", *(f"src/dsrun/{half}" for half in HALVES)} <= set(included)


@pytest.mark.parametrize("half", HALVES)
def test_a_half_cannot_be_imported_by_its_bare_name(half: str, tmp_path: Path) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({half!r}) is not None)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("half", HALVES)
def test_a_users_own_folder_of_that_name_is_theirs(half: str, tmp_path: Path) -> None:
    (tmp_path / half).mkdir()
    (tmp_path / half / "__init__.py").write_text("mine = True\n")
    code = f"import {half}, dsrun.{half}; assert {half}.mine; assert not hasattr(dsrun.{half}, 'mine')"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of a clean copy of the sources, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("built")
    # From a copy: setuptools leaves build/ beside the sources, and what an old one holds would get into the wheel.
    source = out / "source"
    files = ["pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "tests/test_layout.py"]
    subprocess.run(["cp", "-a", "--parents", *files, "src", *HALVES, str(_made(source))], cwd=ROOT, check=True)
    for stale in source.rglob("*.egg-info"):
        subprocess.run(["rm", "-r", str(stale)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> list[str]:
    (wheel,) = built.glob("dsrun-*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def sdist_names(built: Path) -> list[str]:
    """What the sdist holds, without the folder that holds it all."""
    (sdist,) = built.glob("dsrun-*.tar.gz")
    with tarfile.open(sdist) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_the_wheel_holds_both_halves_whole(wheel_names: list[str]) -> None:
    kinds = ("*.py", "*.cpp")
    files = [path for half in HALVES for kind in kinds for path in (ROOT / half).rglob(kind)]
    expected = {f"dsrun/{path.relative_to(ROOT)}" for path in files}
    expected |= {f"dsrun/{half}/py.typed" for half in HALVES} | {"dsrun/__init__.py", "dsrun/config/load.py"}
    assert expected - set(wheel_names) == set()


def test_both_hold_the_package_deepspeed_which_is_none_of_dsruns(
    wheel_names: list[str], sdist_names: list[str]
) -> None:
    folder = ROOT / "src" / "dsrun" / "as_deepspeed" / "site"
    files = {f"dsrun/{path.relative_to(ROOT / 'src' / 'dsrun')}" for path in folder.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith(".pyc")}
    assert any(name.endswith(".dist-info/METADATA") for name in files)
    assert files - set(wheel_names) == set()
    assert {f"src/{name}" for name in files} - set(sdist_names) == set()
    assert not (folder / "__init__.py").exists()


def test_the_wheel_holds_nothing_else(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dsrun"}
    assert [name for name in wheel_names if "test" in name.split("/") or "tests" in name.split("/")] == []


def test_the_sdist_holds_what_a_wheel_is_built_of_and_what_changed(sdist_names: list[str]) -> None:
    expected = {f"src/dsrun/{path.relative_to(ROOT)}" for half in HALVES for path in (ROOT / half).rglob("*.py")}
    expected |= {"pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    assert expected - set(sdist_names) == set()


def test_the_sdist_holds_no_tests_for_they_need_more_than_it_has(sdist_names: list[str]) -> None:
    assert [name for name in sdist_names if name.partition("/")[0] == "tests"] == []
