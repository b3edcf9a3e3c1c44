"""Torch that was imported before the program comes back at the program's own import, and is told what has changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsrun.launcher.agent.start.first_import import honour


class FakeTorch:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.distributed = SimpleNamespace(set_debug_level_from_env=lambda: self.told.append("debug level"))

    def set_num_threads(self, count: int) -> None:
        self.told.append(count)


def told(seen: Mapping[str, str], now: Mapping[str, str], *, compiler: bool = True) -> list[object]:
    torch: Any = FakeTorch()
    honour(seen, now, torch, compiler=compiler)
    return torch.told


@pytest.mark.parametrize(
    ("seen", "now", "expected"),
    [
        ({}, {"OMP_NUM_THREADS": "3"}, [3]),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "3"}, [3]),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}, []),
        ({}, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, ["debug level"]),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, {}, ["debug level"]),
        ({}, {"NCCL_DEBUG": "INFO", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_torch_is_told_what_it_takes(
    capsys: pytest.CaptureFixture[str], seen: dict[str, str], now: dict[str, str], expected: list[object]
) -> None:
    assert told(seen, now) == expected
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("now", [{}, {"OMP_NUM_THREADS": "2,4"}, {"OMP_NUM_THREADS": "0"}])
def test_threads_that_it_cannot_be_told_are_named(capsys: pytest.CaptureFixture[str], now: dict[str, str]) -> None:
    assert told({"OMP_NUM_THREADS": "3"}, now) == []
    assert "OMP_NUM_THREADS was set after the start had imported torch" in capsys.readouterr().err


def test_what_it_does_not_take_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    told({"TORCH_TRACE": "/x", "TORCH_LOGS": "+dynamo"}, {"TORCH_LOGS": "+dynamo", "KMP_AFFINITY": "none"})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "dsrun: KMP_AFFINITY, TORCH_TRACE were set after the start had imported torch, which may have read it by then: "
        "use `--env KMP_AFFINITY=VALUE`, or `--start exec`\n"
    )


def test_the_compilers_variables_are_late_only_where_it_was_imported(capsys: pytest.CaptureFixture[str]) -> None:
    told({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, compiler=False)
    assert capsys.readouterr().err == ""
    told({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    assert "TORCHINDUCTOR_MAX_AUTOTUNE was set after" in capsys.readouterr().err


def hidden(source: str, *, seen: str = "dict(os.environ)", left: str = "{}") -> str:
    """Runs `source` in a process in which torch was imported and hidden; returns what it printed."""
    start = (
        "import os, sys\n"
        "import torch.distributed as first\n"
        "from dsrun.launcher.agent.start.first_import import hide_torch\n"
        "spec = sys.modules['torch'].__spec__\n"
        f"hide_torch(seen={seen}, left={left})\n"
        "assert [name for name in sys.modules if name.partition('.')[0] == 'torch'] == ['torch._utils_internal']\n"
    )
    shown = subprocess.run([sys.executable, "-c", start + source], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    return shown.stdout


@pytest.mark.parametrize(
    "line", ["import torch", "import torch.distributed", "from torch.distributed import Store", "from torch import nn"]
)
def test_each_way_to_import_torch_brings_the_modules_back_as_they_were(line: str) -> None:
    source = (
        f"{line}\n"
        "import torch\n"
        "print(torch.distributed is first, torch.__spec__ is spec, torch.__loader__ is spec.loader)\n"
        "import torch.nn.functional, torch.fx, importlib\n"
        "print(any(type(finder).__module__.startswith('dsrun') for finder in sys.meta_path))\n"
        "print(importlib.util.find_spec('torch') is spec, torch.ones(2).sum().item())\n"
    )
    assert hidden(source) == "True True True\nFalse\nTrue 2.0\n"


def test_who_asks_where_torch_is_before_it_is_imported_is_told() -> None:
    source = (
        "import importlib.util\n"
        "found = importlib.util.find_spec('torch')\n"
        "print(found.origin == spec.origin, found.submodule_search_locations == spec.submodule_search_locations)\n"
        "print(found.loader.get_filename() == spec.origin, hasattr(found.loader, 'load_module'))\n"
        "print('torch' in sys.modules)\n"
    )
    assert hidden(source) == "True True\nTrue False\nFalse\n"


@pytest.mark.parametrize(
    "change",
    [
        "sys.meta_path.insert(0, PathFinder)",
        "sys.meta_path = [finder for finder in sys.meta_path if isinstance(finder, type)]",
    ],
    ids=["before", "in place"],
)
def test_a_finder_that_would_execute_torch_once_more_is_refused(change: str) -> None:
    source = (
        "from importlib.machinery import PathFinder\n"
        f"{change}\n"
        "try:\n"
        "    import torch\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "imports it from its files once more: use `--start exec`" in hidden(source)


def test_who_looks_through_all_modules_for_a_name_imports_nothing() -> None:
    source = (
        "import inspect\n"
        "def found(name):\n"
        "    return [module for module in list(sys.modules.values()) if hasattr(module, name)]\n"
        "print(len(found('__name__')) > 9, found('no_such_name'), inspect.getmodule(found).__name__)\n"
        "print('torch' in sys.modules)\n"
        "from torch._utils_internal import get_file_path\n"
        "print('torch' in sys.modules, get_file_path is sys.modules['torch._utils_internal'].get_file_path)\n"
    )
    assert hidden(source) == "True [] __main__\nFalse\nTrue True\n"


def test_pythons_lazy_loader_gets_the_modules_that_are_there() -> None:
    source = (
        "from importlib.util import LazyLoader, find_spec, module_from_spec\n"
        "found = find_spec('torch')\n"
        "found.loader = LazyLoader(found.loader)\n"
        "lazy = sys.modules['torch'] = module_from_spec(found)\n"
        "found.loader.exec_module(lazy)\n"
        "print('torch.distributed' in sys.modules)\n"
        "print(lazy.ones(2).sum().item(), sys.modules['torch.distributed'] is first)\n"
    )
    assert hidden(source) == "False\n2.0 True\n"


def test_threads_that_import_it_at_once_all_get_it() -> None:
    source = (
        "import threading\n"
        "gate = threading.Barrier(4)\n"
        "def load(name):\n"
        "    gate.wait()\n"
        "    __import__(name)\n"
        "    seen.append(sys.modules['torch.distributed'] is first)\n"
        "seen = []\n"
        "names = ('torch', 'torch.nn', 'torch.distributed', 'torch.optim')\n"
        "threads = [threading.Thread(target=load, args=(name,)) for name in names]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(seen)\n"
    )
    assert hidden(source) == "[True, True, True, True]\n"


def test_what_the_import_set_itself_is_set_at_the_programs_import_unless_the_program_has() -> None:
    source = "os.environ['A'] = 'mine'\nimport torch\nprint(os.environ['A'], os.environ['B'])"
    assert hidden(source, left="{'A': '1', 'B': '2'}") == "mine 2\n"


def test_what_the_import_set_itself_is_no_change_of_the_programs() -> None:
    # `hidden` sees that nothing is said on stderr.
    assert hidden("import torch\nprint(os.environ['TORCH_X'])", left="{'TORCH_X': '1'}") == "1\n"


def test_a_program_that_imports_no_torch_ends_with_it_back() -> None:
    # Registered before torch's own import, so that it runs after what brings torch back.
    source = "print(os.environ.get('A'))\n"
    before = "import atexit, sys; atexit.register(lambda: print(sys.modules['torch.distributed'] is first))\n"
    start = (
        f"{before}import os\nimport torch.distributed as first\n"
        "from dsrun.launcher.agent.start.first_import import hide_torch\n"
        "hide_torch(seen=dict(os.environ), left={'A': '1'})\n"
    )
    shown = subprocess.run([sys.executable, "-c", start + source], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "None\nTrue\n", "")


def test_the_first_import_is_told_when_it_begins_and_ends_and_not_where_it_is_only_looked_for(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("print('imports')\nimport torch.part\n")
    (tmp_path / "torch/part.py").write_text("")
    code = (
        "import importlib.util, sys\n"
        "from dsrun.launcher.agent.start.first_import import watch_import\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "watch_import(print)\n"
        "assert importlib.util.find_spec('torch').origin\n"
        "import torch\n"
        "import torch.part\n"
        "print(torch.__spec__.loader.get_filename('torch') == torch.__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "imports", "False", "True"]
