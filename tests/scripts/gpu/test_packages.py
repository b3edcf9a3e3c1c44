"""Which packages a machine lacks, and which wheels of a folder fill the gap."""

from __future__ import annotations

from pathlib import Path

from gpu.packages import Wheel, choose, missing, tools_of_tests, wheels_in

from support.wheels import make_wheel


def wheel(name: str, version: str, *needs: str) -> Wheel:
    return Wheel(Path(f"{name}.whl"), name, version, needs)


def names(wheels: list[Wheel]) -> list[str]:
    return [one.name for one in wheels]


def test_what_is_missing_or_too_old_is_installed_with_its_needs_and_nothing_else() -> None:
    wheels = {
        one.name: one
        for one in (
            wheel("fabric", "3.2", "paramiko>=2.4", 'old; python_version < "3"', 'pytest; extra == "test"'),
            wheel("paramiko", "5.1", "numpy"),
            wheel("numpy", "2.0"),
            wheel("xxhash", "4.1"),
        )
    }
    installed = {"numpy": "2.5", "xxhash": "3.1"}
    chosen, unmet = choose(["numpy>=1.24", "xxhash>=3.4", "fabric>=3.2"], wheels, installed=installed.get)
    assert names(chosen) == ["xxhash", "fabric", "paramiko"]
    assert unmet == []


def test_what_neither_the_machine_nor_a_wheel_meets_is_said() -> None:
    chosen, unmet = choose(["a>=2", "b>=1"], {"a": wheel("a", "1.9"), "b": wheel("b", "1.0", "c")}, installed={}.get)
    assert names(chosen) == ["b"]
    assert unmet == ["a>=2", "c"]


def test_names_are_one_however_they_are_written(tmp_path: Path) -> None:
    make_wheel(tmp_path, "Nvidia_ML.py", "13.0", "Pydantic_Core")
    make_wheel(tmp_path, "pydantic-core", "2.0")
    chosen, unmet = choose(["nvidia-ml-py>=12"], wheels_in(tmp_path), installed={}.get)
    assert (names(chosen), unmet) == (["nvidia-ml-py", "pydantic-core"], [])


def test_markers_are_those_of_the_other_machine() -> None:
    wheels = {"a": wheel("a", "1", 'b; python_version < "3.12"')}
    assert choose(["a"], wheels, installed={}.get, environment={"python_version": "3.12"})[1] == []
    assert choose(["a"], wheels, installed={}.get, environment={"python_version": "3.11"})[1] == [
        'b; python_version < "3.12"'
    ]


def test_this_interpreter_has_what_dsrun_needs() -> None:
    assert missing() == []
    assert any(one.startswith("pytest>=") for one in tools_of_tests())
