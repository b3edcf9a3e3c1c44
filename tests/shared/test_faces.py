"""Faces have every name that type checkers see, each from where it lives, and importing one imports no torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsrun.faces import lazy_face

#: Each face, with the names that it has itself.
FACES: dict[str, set[str]] = {
    "dsrun": {"__version__", "version"},
    "dsrun.checkpointing": set(),
    "dsrun.comm": {"get_local_rank"},
    "dsrun.data": set(),
    "dsrun.long_sequence": set(),
    "dsrun.ops": set(),
    "dsrun.ops.adagrad": set(),
    "dsrun.ops.adam": set(),
    "dsrun.ops.lamb": set(),
    "dsrun.ops.lion": set(),
    "dsrun.pipe": set(),
    "dsrun.profiling": set(),
    "dsrun.profiling.flops_profiler": set(),
    "dsrun.utils": set(),
    "dsrun.zero": set(),
}


def names_for_type_checkers(face: Any) -> dict[str, tuple[str, str]]:
    """Returns names under `TYPE_CHECKING`, each with its module and its name there."""
    tree = ast.parse(Path(face.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    names: dict[str, tuple[str, str]] = {}
    private = set[str]()
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            names |= {name.asname or name.name: (str(node.module), name.name) for name in node.names}
            private |= {name.name for name in node.names if name.asname is None}
        elif isinstance(node, ast.Assign):
            (target,) = node.targets
            if isinstance(node.value, ast.Attribute):
                names[ast.unparse(target)] = (".".join(names[ast.unparse(node.value.value)]), node.value.attr)
            else:
                names[ast.unparse(target)] = names[ast.unparse(node.value)]
    return {name: home for name, home in names.items() if name not in private}


@pytest.mark.parametrize("name", FACES)
def test_a_face_has_what_type_checkers_see_from_where_they_see_it(name: str) -> None:
    face = importlib.import_module(name)
    seen = names_for_type_checkers(face)
    assert set(seen) | FACES[name] == set(face.__all__)
    assert dir(face) == sorted(face.__all__) == face.__all__
    for here, (module, there) in seen.items():
        home = importlib.import_module(module)
        expected = importlib.import_module(f"{name}.{there}") if home is face else getattr(home, there)
        assert getattr(face, here) is expected


def test_every_face_is_listed_here() -> None:
    import dsrun

    folder = Path(str(dsrun.__file__)).parent
    files = [*folder.glob("*.py"), *folder.glob("ops/*.py"), *folder.glob("profiling/*.py")]
    faces = {path.relative_to(folder.parent) for path in files if "= lazy_face(" in path.read_text()}
    named = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in faces}
    assert named == set(FACES)


def test_importing_all_faces_imports_no_torch() -> None:
    program = f"import {', '.join(FACES)}, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False False"


def test_a_name_may_be_another_where_it_lives() -> None:
    names, get, listed = lazy_face("made.up", {"json": ("dumps as to_text", "loads")}, own=("kept",))
    assert names == listed() == ["kept", "loads", "to_text"]
    assert get("to_text")([1]) == "[1]"
    with pytest.raises(AttributeError, match=r"^module 'made\.up' has no attribute 'dumps'$"):
        get("dumps")


def test_names_beyond_the_table_are_those_of_one_module_and_public() -> None:
    _, get, listed = lazy_face("made.up", {"json": ("loads",)}, beyond="math")
    assert get("sqrt")(4) == 2
    assert listed() == ["loads"]
    for name in ("__spec__", "no_such_name"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            get(name)


def test_a_name_of_deepspeeds_that_is_gone_says_what_to_use_instead() -> None:
    import dsrun

    with pytest.raises(AttributeError, match=r"'dsrun' has no attribute 'init_inference': dsrun trains"):
        _ = dsrun.init_inference  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'TiledLinear': a large Linear is a unit of its own"):
        _ = dsrun.zero.TiledLinear  # type: ignore[attr-defined]
