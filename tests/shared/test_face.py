"""What importing dsrun costs, in a fresh interpreter: the launcher and the shared ground must stay free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "pydantic", "rich", "fabric", "yaml", "click")


def imported_by(statement: str) -> set[str]:
    """Returns the heavy packages that a fresh interpreter has loaded after `statement`."""
    program = f"{statement}\nimport sys\nprint(*(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import dsrun", set[str]()),
        ("import dsrun.zero", set[str]()),
        ("import dsrun.checkpointing", set[str]()),
        ("import dsrun.long_sequence, dsrun.choices.attention_kernels", set[str]()),
        ("import dsrun.contract.environment, dsrun.errors, dsrun.units, dsrun.files.atomic", set[str]()),
        ("import dsrun.launcher.cli", {"click"}),
        ("import dsrun.launcher.agent.main", set[str]()),
        ("import dsrun.launcher.agent.start.spawner", set[str]()),
        ("import dsrun.launcher.session.agents, dsrun.launcher.transport.local", set[str]()),
        ("import dsrun.config.load", {"pydantic", "yaml"}),
    ],
)
def test_importing_loads_no_more_than_is_needed(statement: str, allowed: set[str]) -> None:
    assert imported_by(statement) <= allowed


def test_the_face_offers_the_engine_on_first_use() -> None:
    import dsrun

    assert "initialize" in dir(dsrun)
    assert callable(dsrun.initialize)
    assert dsrun.Engine.__name__ == "Engine"
    with pytest.raises(AttributeError, match="has no attribute 'initialise'"):
        _ = dsrun.initialise  # type: ignore[attr-defined]


def test_every_name_of_the_long_sequence_face_is_there() -> None:
    from dsrun import long_sequence

    assert dir(long_sequence) == sorted(long_sequence.__all__)
    for name in long_sequence.__all__:
        assert getattr(long_sequence, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'dsrun\.long_sequence' has no attribute 'tile'"):
        _ = long_sequence.tile  # type: ignore[attr-defined]


def test_every_name_of_the_zero_face_is_there() -> None:
    import dsrun

    assert dir(dsrun.zero) == sorted(dsrun.zero.__all__)
    for name in dsrun.zero.__all__:
        assert getattr(dsrun.zero, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'dsrun\.zero' has no attribute 'init'"):
        _ = dsrun.zero.init  # type: ignore[attr-defined]
