"""A rank whose program ended well destroys its NCCL groups, waits a few seconds at most, and never after a failure."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsrun.contract.environment import ERROR_FILE_ENV, LEAVING_THREAD
from support.cli import clean_environment
from support.forked_programs import Ended, run_programs

#: Gloo stands for NCCL: what is proved is when the group is destroyed, and how long that may take.
START = f"""
import atexit, threading
import torch.distributed as dist
from dsrun.runtime.compat import HashStore
from dsrun.runtime.mesh.join.last_leave import LastLeave
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
atexit.register(lambda: print("there" if dist.is_initialized() else "left", flush=True))
last_leave = LastLeave(patience_s=0.2)
atexit.register(last_leave.at_exit)
class Axis:
    def __init__(self, idle):
        self.idle = idle
    def becomes_idle(self, *, patience_s):
        return self.idle
    def close(self):
        print("closed", flush=True)
def stuck():
    print("begun", flush=True)
    threading.Event().wait()
def launcher_leaves():
    threading.Thread(target=threading.Event().wait, name={LEAVING_THREAD!r}, daemon=True).start()
"""


#: How a program ends, its exit code, and what it says meanwhile.
ENDS = [
    ("", 0, ["left"]),
    ("raise SystemExit(7)", 7, ["left"]),
    ("raise ValueError('no')", 1, ["there"]),
    # A group that the script has destroyed, and one that another mesh's end has.
    ("dist.destroy_process_group()", 0, ["left"]),
    ("last_leave.cancel()", 0, ["there"]),
    # Other ranks hang: so does what waits for them, in its thread.
    ("dist.destroy_process_group = stuck", 0, ["begun", "there"]),
    # What is on the group lets go of it first; with a collective under way, nobody does.
    ("last_leave.add([Axis(True), Axis(True)])", 0, ["closed", "closed", "left"]),
    ("last_leave.add([Axis(True), Axis(False)])", 0, ["there"]),
    # Another thread is about to do it.
    ("launcher_leaves(); last_leave.add([Axis(True)])", 0, ["closed", "there"]),
]


@pytest.fixture(scope="module")
def ends() -> dict[str, Ended]:
    """How the programs ended, each a fork with torch, as ranks are."""
    return {
        last: end for (last, _, _), end in zip(ENDS, run_programs([START + last for last, _, _ in ENDS]), strict=True)
    }


@pytest.mark.parametrize(("last", "code", "told"), ENDS)
def test_the_group_is_destroyed_unless_the_program_failed_or_another_does_it(
    ends: dict[str, Ended], last: str, code: int, told: list[str]
) -> None:
    end = ends[last]
    assert (end.code, end.out.splitlines()) == (code, told), end.err


def test_a_failure_that_a_launcher_was_told_of_is_one(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    start = f"import os; os.environ[{ERROR_FILE_ENV!r}] = {str(path)!r}\n{START}"
    told = f"open({str(path)!r}, 'w').write('{{}}')\n"
    well, failed = run_programs([start, f"{start}{told}raise SystemExit(1)"])
    assert (well.code, well.out.splitlines()) == (0, ["left"])
    assert (failed.code, failed.out.splitlines()) == (1, ["there"])


_TRAINS = """
import torch, dsrun
model = torch.nn.Linear(4, 4)
settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine = dsrun.initialize(model=model, config=settings)[0]
assert engine.device.type == "cuda"
engine.backward(engine(torch.ones(1, 4, device=engine.device)).sum())
engine.step()
"""
_JOINS = """
import torch, torch.distributed as dist
from dsrun.runtime.compat import HashStore
dist.init_process_group(%s store=HashStore(), rank=0, world_size=1)
value = torch.ones(4, device="cuda")
dist.all_reduce(value)
torch.cuda.synchronize()
"""
#: As the launcher starts a script.
_BOOTSTRAP = "import sys; from dsrun.launcher.agent.start.bootstrap import run; run('script', sys.argv[1], [])"


#: By how they join: dsrun alone, the script in any words and then dsrun, the script alone.
_SCRIPTS = {
    "by itself": (False, _TRAINS),
    "launched": (True, _JOINS % "" + _TRAINS),
    "without dsrun": (True, (_JOINS % "'cpu:gloo,cuda:nccl', ").replace("dsrun.runtime.compat", "torch.distributed")),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit codes of the scripts, and what they said: they run at once, for each is seconds of imports."""
    folder = tmp_path_factory.mktemp("scripts")
    running: dict[str, subprocess.Popen[str]] = {}
    with ExitStack() as stack:
        for name, (launched, source) in _SCRIPTS.items():
            path = folder / f"{name}.py"
            path.write_text(source)
            command = [sys.executable, *(["-c", _BOOTSTRAP] if launched else []), str(path)]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
            running[name] = stack.enter_context(process)
            stack.callback(process.kill)
        said = {name: process.communicate(timeout=25)[1] for name, process in running.items()}
        return {name: (process.returncode, said[name]) for name, process in running.items()}


@pytest.mark.cuda
@pytest.mark.gpu_seconds(4)
@pytest.mark.parametrize("script", ["by itself", "launched"])
def test_a_script_without_destroy_ends_without_torchs_warning(script: str, ended: dict[str, tuple[int, str]]) -> None:
    code, said = ended[script]
    assert code == 0, said
    assert "destroy_process_group" not in said


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.1)
def test_a_launched_script_that_never_imports_dsrun_ends_without_torchs_warning(
    ended: dict[str, tuple[int, str]],
) -> None:
    code, said = ended["without dsrun"]
    assert code == 0, said
    assert "destroy_process_group" not in said
