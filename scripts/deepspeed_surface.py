"""Records what DeepSpeed's source defines: the facts that the tests of drop-in mode compare dsrun with.

    python scripts/deepspeed_surface.py FOLDER     # a `deepspeed` package of the version that dsrun stands for

Writes tests/support/deepspeed_surface.txt. A line is a module below `deepspeed` and its public classes and functions,
those of its parameters in brackets; `class` begins the line of a class and its public methods. Nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "support" / "deepspeed_surface.txt"
#: Classes whose methods scripts call: the module, and the class.
CLASSES = (
    ("accelerator.abstract_accelerator", "DeepSpeedAccelerator"),
    ("runtime.engine", "DeepSpeedEngine"),
    ("runtime.pipe.engine", "PipelineEngine"),
)
#: Folders of which the names alone are recorded, without parameters: nothing of them is in dsrun.
NAMES_ALONE = (
    *("autotuning", "compile", "inference", "io", "linear", "model_implementations", "moe", "monitor", "nvme"),
    *("ops.op_builder", "ops.transformer", "ops.triton_ops", "runtime.domino", "runtime.rollout", "sequence"),
)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    facts = lines(folder)
    OUT.write_text("\n".join(facts) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(facts)} lines")


def lines(folder: Path) -> list[str]:
    """Returns the lines of the file, in order.

    Args:
        folder: Folder of the package.
    """
    return sorted([*_modules(folder), *_classes(folder)])


def _modules(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts[:-1] if path.name == "__init__.py" else parts)
        is_short = any(module == top or module.startswith(f"{top}.") for top in NAMES_ALONE)
        names = dict(sorted(_public(_read(path).body, is_face=path.name == "__init__.py")))
        entries = [
            name if is_short or not parameters else f"{name}({parameters})" for name, parameters in names.items()
        ]
        yield f"{module or '.'}: {' '.join(entries)}".rstrip()


def _classes(folder: Path) -> Iterator[str]:
    for module, name in CLASSES:
        tree = _read(folder / f"{module.replace('.', '/')}.py")
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        yield f"class {module}.{name}: {_entries(_public(found.body, is_face=False))}"


def _entries(names: Iterable[tuple[str, str]], *, is_short: bool = False) -> str:
    known = sorted(dict(names).items())
    return " ".join(name if is_short or not parameters else f"{name}({parameters})" for name, parameters in known)


def _read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _public(body: list[ast.stmt], *, is_face: bool) -> Iterator[tuple[str, str]]:
    """Yields each public class and function with its parameters, comma-separated.

    Args:
        body: Statements of a module or class.
        is_face: Whether names that are imported from elsewhere in the package count: an `__init__.py`.
    """
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_setter = any(isinstance(part, ast.Attribute) and part.attr == "setter" for part in node.decorator_list)
            if not node.name.startswith("_") and not is_setter:
                yield node.name, _parameters(node)
        elif (
            isinstance(node, ast.ImportFrom) and is_face and (node.level or (node.module or "").startswith("deepspeed"))
        ):
            imported = (alias.asname or alias.name for alias in node.names)
            yield from ((name, "") for name in imported if name != "*" and not name.startswith("_"))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _public(part, is_face=is_face)


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns the names of a function's parameters, or of a class's own `__init__`; empty where there are none."""
    if isinstance(node, ast.ClassDef):
        made = [entry for entry in node.body if isinstance(entry, ast.FunctionDef) and entry.name == "__init__"]
        return _parameters(made[-1]) if made else ""
    arguments = node.args
    plain = [part.arg for part in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = [f"*{part.arg}" for part in [arguments.vararg] if part] + [
        f"**{part.arg}" for part in [arguments.kwarg] if part
    ]
    return ",".join(name for name in [*plain, *rest] if name not in ("self", "cls"))


if __name__ == "__main__":
    main()
