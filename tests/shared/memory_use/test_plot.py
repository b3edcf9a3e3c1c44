"""Pictures of memory: written where matplotlib is, refused with a way out where something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsrun.errors import InputError
from dsrun.memory_use.plot import save_plot
from dsrun.memory_use.samples import MemorySample, TierUse

USE = TierUse(
    tier="cpu", held_bytes=9 << 20, peak_bytes=9 << 20, live_bytes=1, reserved_bytes=2, kinds=(("masters", 5),)
)
SAMPLES = [MemorySample(step=1, phase="forward", tiers=(USE,))]


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_what_its_ending_says(tmp_path: Path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"memory.{ending}"
    save_plot(SAMPLES, path)
    assert path.read_bytes().startswith(magic)


def test_an_ending_of_no_picture_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match=r"memory\.doc cannot be written"):
        save_plot(SAMPLES, tmp_path / "memory.doc")


def test_without_matplotlib_the_error_has_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What an import finds where the package is not installed.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="matplotlib is not installed") as caught:
        save_plot(SAMPLES, tmp_path / "memory.png")
    assert "dsrun[examples]" in caught.value.render()


def test_nothing_sampled_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step was sampled yet"):
        save_plot([], tmp_path / "memory.png")
