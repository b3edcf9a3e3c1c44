"""A script under bootstrap behaves as under plain python, except that errors are shown better."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.contract.environment import HEARTBEAT_ENV
from dsrun.contract.error_file import read_error_file
from dsrun.contract.heartbeats import HeartbeatTable, StartState
from dsrun.launcher.isolated_command import isolated_command


def run(
    folder: Path, kind: str, target: str, *args: str, error_file: str = "error.json"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / error_file)}
    command = isolated_command(sys.executable, "dsrun.launcher.agent.start.bootstrap", kind, target, *args)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)


def script(folder: Path, source: str) -> str:
    path = folder / "sub" / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return str(path)


SHOW_SELF = """
import atexit, pickle, sys, threading
class Point: pass
atexit.register(lambda: print("atexit", pickle.loads(pickle.dumps(Point())).__class__.__module__))
gate = threading.Event()
def late():
    gate.wait()
    print("thread", sys.modules["__main__"].Point is Point)
threading.Thread(target=late).start()
print(sys.argv, sys.path[0], __name__, __file__, sys.modules["__main__"].Point is Point)
import queue
print(queue.mine)
gate.set()
"""


def test_a_script_sees_what_plain_python_shows_it(tmp_path: Path) -> None:
    path = script(tmp_path, SHOW_SELF)
    (tmp_path / "sub" / "queue.py").write_text("mine = 'mine'")
    (tmp_path / "queue.py").write_text("mine = 'of the working folder'")
    plain = subprocess.run(
        [sys.executable, path, "a b", ""], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    ours = run(tmp_path, "script", path, "a b", "")
    assert (ours.returncode, ours.stderr) == (0, "")
    assert ours.stdout == plain.stdout


def test_a_module_sees_what_plain_python_shows_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(sys.argv, sys.path[0], __name__, __package__, __spec__.name)")
    plain = subprocess.run(
        [sys.executable, "-m", "package.train", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    ours = run(tmp_path, "module", "package.train", "x")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, "")


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("", StartState.RUNS),
        ("import torch", StartState.IMPORTS_TORCH),
        # A process of the script's own that ends in its import, as a killed worker of a loader does.
        ("import os\npid = os.fork()\nif not pid:\n    import torch\nos.waitpid(pid, 0)", StartState.RUNS),
    ],
)
def test_a_rank_tells_of_its_own_import_of_torch_and_not_of_its_childrens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: StartState
) -> None:
    table = HeartbeatTable(1)
    monkeypatch.setenv(HEARTBEAT_ENV, table.path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    target = script(tmp_path, source)
    (tmp_path / "sub/torch.py").write_text("import os\nos._exit(0)\n")
    assert table.read_start(0) == StartState.NOT_BEGUN
    assert run(tmp_path, "script", target).returncode == 0
    assert table.read_start(0) == state
    table.close()


@pytest.mark.parametrize(
    ("source", "code", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(5)", 5, ""),
        ("import sys; sys.exit('gone')", 1, "gone\n"),
        ("raise SystemExit(None)", 0, ""),
        ("import os; os.abort()", -6, None),
    ],
)
def test_exit_codes_are_those_of_plain_python(tmp_path: Path, source: str, code: int, stderr: str | None) -> None:
    ours = run(tmp_path, "script", script(tmp_path, source))
    assert ours.returncode == code
    assert stderr is None or ours.stderr == stderr


def test_an_exception_is_shown_from_the_users_code_on_and_left_in_the_error_file(tmp_path: Path) -> None:
    path = script(tmp_path, "def step():\n    raise ValueError('boom')\nstep()\n")
    ours = run(tmp_path, "script", path)
    assert ours.returncode == 1
    assert ours.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}", line 3, in <module>\n')
    assert ours.stderr.endswith("ValueError: boom\n")
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert error.message == "ValueError: boom"
    assert error.traceback == ours.stderr


def test_a_script_that_does_not_parse_shows_where_without_our_frames(tmp_path: Path) -> None:
    ours = run(tmp_path, "script", script(tmp_path, "x = ("))
    assert ours.returncode == 1
    assert "SyntaxError" in ours.stderr
    assert "bootstrap" not in ours.stderr


def test_keyboard_interrupt_dies_by_sigint_without_a_stack(tmp_path: Path) -> None:
    ours = run(tmp_path, "script", script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGINT)"))
    assert ours.returncode == -2
    assert ours.stderr == ""


NO_PARAMETERS = "from dsrun.errors import ModelError\nraise ModelError('model: no parameters', hint='add some')"


def test_a_dsrun_error_is_left_to_the_launcher_to_show_once_for_all_ranks(tmp_path: Path) -> None:
    ours = run(tmp_path, "script", script(tmp_path, NO_PARAMETERS))
    assert (ours.returncode, ours.stderr) == (2, "")
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert (error.message, error.traceback) == ("error: model: no parameters\nhint: add some", "")


@pytest.mark.parametrize(
    ("error_file", "before"),
    [("error.json", ""), ("gone/error.json", "dsrun: cannot write {path}: No such file or directory\n")],
)
def test_a_dsrun_error_that_cannot_be_left_is_shown_as_its_lines(tmp_path: Path, error_file: str, before: str) -> None:
    (tmp_path / "error.json").write_text("that of another process of this rank")
    ours = run(tmp_path, "script", script(tmp_path, NO_PARAMETERS), error_file=error_file)
    expected = before.format(path=tmp_path / error_file) + "error: model: no parameters\nhint: add some\n"
    assert (ours.returncode, ours.stderr) == (2, expected)


def test_a_missing_script_is_bad_input(tmp_path: Path) -> None:
    ours = run(tmp_path, "script", "nowhere.py")
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert ours.returncode == 2
    assert error.message == "error: script: cannot read 'nowhere.py': No such file or directory"


def test_an_exception_that_cannot_be_turned_into_text_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    source = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Odd"
    ours = run(tmp_path, "script", script(tmp_path, source))
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert error.message == "Odd: <exception str() failed>"
    assert ours.returncode == 1
    assert ours.stderr.endswith("Odd: <exception str() failed>\n")
    assert "RuntimeError" not in ours.stderr


def test_the_users_own_excepthook_is_called(tmp_path: Path) -> None:
    source = "import sys\nsys.excepthook = lambda t, e, s: print('hook', e)\nraise ValueError('boom')"
    ours = run(tmp_path, "script", script(tmp_path, source))
    assert (ours.returncode, ours.stdout, ours.stderr) == (1, "hook boom\n", "")


def test_a_crash_in_native_code_shows_the_python_stack(tmp_path: Path) -> None:
    ours = run(tmp_path, "script", script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"))
    assert ours.returncode == -11
    assert "Segmentation fault" in ours.stderr
    assert "train.py" in ours.stderr


FROZEN = """
import gc, os, sys, types
from dsrun.launcher.agent.start.bootstrap import enter_forked_rank
class Bound:
    def __del__(self):
        os.write(1, b"freed\\n")
bound = Bound()
bound.itself = bound
del bound
if sys.argv[1:]:
    sys.modules["triton"] = types.ModuleType("triton")
gc.freeze()
enter_forked_rank(os.environ.copy())
import atexit
atexit.register(lambda: print("the program's own handler", gc.get_freeze_count() > 0))
"""


@pytest.mark.parametrize(("loaded", "freed"), [((), ""), (("triton",), "freed\n")])
def test_a_fork_frees_what_its_spawner_imported_only_where_triton_would_call_it_a_leak(
    loaded: tuple[str, ...], freed: str
) -> None:
    command = [sys.executable, "-c", FROZEN, *loaded]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the program's own handler True\n{freed}"
