"""What a script's text says of the variables that it sets before it imports torch."""

from __future__ import annotations

import pytest

from dsrun.launcher.plan.script_variables import VariableAssignment, settings_before_torch


def names(text: str) -> list[str]:
    return [setting.name for setting in settings_before_torch(text.encode())]


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['A'] = '1'",
        "os.environ['A']: str = '1'",
        "os.environ['A'] += '1'",
        "environ['A'] = '1'",
        "os.environ.setdefault('A', '1')",
        "os.environ.pop('A')",
        "os.environ.pop('A', None)",
        "os.environ.update({'A': '1'})",
        "os.environ.update(A='1')",
        "os.environ.update(dict(A='1'))",
        "os.environ |= {'A': '1'}",
        "os.putenv('A', '1')",
        "del os.environ['A']",
        "x = os.environ['A'] = '1'",
        "if fast:\n    os.environ['A'] = '1'",
        "def prepare():\n    os.environ['A'] = '1'",
    ],
)
def test_each_way_to_set_a_variable_is_found(line: str) -> None:
    assert names(line) == ["A"]


@pytest.mark.parametrize(
    "line",
    [
        "print(os.environ['A'], os.environ.get('A'), 'A' in os.environ)",
        "other['A'] = os.environ['B']",
        "os.environ[name] = '1'",
        "os.environ.update(settings, **more)",
        "os.environ |= settings",
        "# os.environ['A'] = '1'",
        "os.environ['A'] = (",
        "os.environ['A'] = '\0'",
        pytest.param("os.environ['A'] = " + "-" * 100_000 + "1", id="too deep for Python"),
        "",
    ],
)
def test_what_sets_none_or_names_none_gives_none(line: str) -> None:
    assert names(line) == []


def test_what_python_warns_of_in_a_script_is_left_to_its_run() -> None:
    assert names(r"os.environ['A'] = '\d'") == ["A"]


def test_the_place_and_the_value_are_told_in_the_scripts_order() -> None:
    text = b"import os\nos.environ['B'] = '2'\nos.environ['A'] = str(1)\n"
    assert settings_before_torch(text) == [VariableAssignment("B", 2, "2"), VariableAssignment("A", 3, None)]


@pytest.mark.parametrize("torch", ["import torch", "import numpy, torch.nn as nn", "from torch.nn import functional"])
def test_what_is_set_below_the_import_of_torch_counts_as_little_as_under_plain_python(torch: str) -> None:
    assert names(f"os.environ['A'] = '1'\n{torch}\nos.environ['B'] = '2'\n") == ["A"]


def test_an_import_that_may_fail_or_end_counts_as_one() -> None:
    assert names("try:\n    import torch\nexcept ImportError:\n    torch = None\nos.environ['B'] = '2'\n") == []


@pytest.mark.parametrize(
    "maybe",
    [
        "if TYPE_CHECKING:\n    import torch",
        "def late():\n    import torch",
        "import torchvision",
        "from . import torch",
    ],
)
def test_an_import_that_may_not_have_happened_hides_nothing(maybe: str) -> None:
    assert names(f"{maybe}\nos.environ['B'] = '2'\n") == ["B"]
