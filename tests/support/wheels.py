"""Wheels with next to nothing in them, for tests of what installs them."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, *needs: str, padding: int = 0) -> None:
    """Writes a wheel with one module and a given weight."""
    folder.mkdir(exist_ok=True)
    stem = name.replace("-", "_")
    about = f"{stem}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}_of_a_wheel.py", "here = True\n" + "#" * padding)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
