"""What a forked rank must not notice of its spawner: no GPU was opened before the fork, and what the script sets before
its `import torch` counts, or the start says that it does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cli import Result, clean_environment
from support.torch_builds import cuda_build, is_built_for_cuda

pytestmark = pytest.mark.timeout(180)
SOURCES = Path(__file__).parents[2] / "src"
DRIVERS = re.compile(r"find library=(libcuda|libnvidia-ml)\.so\.1 ")
#: Where it is, ranks of a spawner that asks are not forked, and a library that is loaded is not searched for again.
DRIVER = Path("/dev/nvidiactl")
#: These look for the driver's library where they are loaded themselves, and call nothing in it.
LOOKING = re.compile(r"calling init: .*/(libcublasLt|libcusparseLt)\.so")


@pytest.fixture(scope="module", params=["this build", "CUDA build"])
def any_python(request: pytest.FixtureRequest) -> str:
    return sys.executable if request.param == "this build" else cuda_build()


def config_of(folder: Path) -> list[str]:
    """Returns words that give a job a config: with one, the compiler is imported before the fork, too."""
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    return ["--config", "ds.json"]


@pytest.fixture(params=["without a config", "with a config"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Words that give the job a config or none."""
    return [] if request.param == "without a config" else config_of(tmp_path)


def dsrun(folder: Path, script: str, *words: str, python: str = sys.executable, **env: str) -> Result:
    """Runs `dsrun` with a script; the lines of its ranks come without their tags."""
    (folder / "train.py").write_text(script)
    # Packages may be found by this variable alone: on a machine that was given some for a while.
    path = os.pathsep.join([str(folder / "path"), str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [python, "-m", "dsrun", *words],
        cwd=folder,
        env=clean_environment(PYTHONPATH=path, HOME=str(folder), **env),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Result(run.returncode, re.sub(r"^\[\d+\] ", "", run.stdout, flags=re.MULTILINE), run.stderr)


def in_the_spawner(folder: Path, source: str) -> None:
    """Has every spawner run `source` as its interpreter starts, as a user's own `sitecustomize` would."""
    (folder / "path").mkdir()
    body = "".join(f"    {line}\n" for line in source.splitlines())
    start = "import sys\nif 'dsrun.launcher.agent.start.spawner' in ' '.join(sys.orig_argv):\n"
    (folder / "path" / "sitecustomize.py").write_text(start + body)


@dataclass(frozen=True, slots=True)
class Searches:
    """Who looked for the drivers' libraries: what the loader wrote of each process, in order."""

    folder: Path

    def environment(self) -> dict[str, str]:
        return {"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(self.folder / "loader")}

    def of(self, pid: int) -> list[str]:
        """Returns which drivers' libraries a process looked for, but for those that only look."""
        found: list[str] = []
        initialiser = ""
        for file in self.folder.glob("loader.*"):
            for line in file.read_text(errors="replace").splitlines():
                number, _, text = line.partition(":")
                if number.strip() != str(pid):
                    continue
                initialiser = text if "calling init:" in text else initialiser
                match = DRIVERS.search(text)
                if match is not None and LOOKING.search(initialiser) is None:
                    found.append(match[1])
        return found

    def of_others(self, *pids: int) -> set[str]:
        """Returns which drivers' libraries any process but these looked for."""
        numbers = {int(file.suffix[1:]) for file in self.folder.glob("loader.*")}
        return {name for pid in numbers - set(pids) for name in self.of(pid)}


RANK = """
import os, sys
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
gpus = [file for file in files if file.startswith("/dev/nvidia")]
forked = b"dsrun.launcher.agent.start.spawner" in open("/proc/self/cmdline", "rb").read()
print("start", os.getpid(), os.getppid(), forked, gpus, "torch" in sys.modules, flush=True)
import torch
print("torch", torch.cuda.is_initialized(), getattr(torch._C, "_cuda_isInBadFork", lambda: False)(), flush=True)
torch.cuda.is_available()
"""


def started(result: Result, *, bad_fork: bool = False) -> tuple[list[int], int]:
    """Returns the pids of ranks that were forked without an open GPU, and their spawner's."""
    assert result.exit_code == 0, result.stderr
    rows = re.findall(r"^start (\d+) (\d+) True \[\] False$", result.stdout, re.MULTILINE)
    assert len(rows) == 2, result.stdout
    assert len(re.findall(rf"^torch False {bad_fork}$", result.stdout, re.MULTILINE)) == 2, result.stdout
    return [int(pid) for pid, _ in rows], int(rows[0][1])


#: Notes the calls, in the spawner, of what would open a GPU if there were one; a forked rank finds the list.
COUNTING = """
import os
asking = {"is_available", "device_count", "init", "_lazy_init", "current_device", "set_device", "nvmlInit",
          "nvmlInitWithFlags", "get_device_properties", "get_device_capability", "get_device_name", "mem_get_info",
          "current_accelerator", "is_bf16_supported", "synchronize", "_raw_device_count_nvml", "_device_count_nvml"}
places = ("torch/cuda/__init__.py", "torch/cuda/memory.py", "torch/accelerator/__init__.py", "pynvml.py")
calls = []
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in asking and code.co_filename.endswith(places):
        calls.append(code.co_name)
sys.setprofile(note)
os.register_at_fork(after_in_child=lambda: sys.setprofile(None))
"""
COUNTED = "import sitecustomize\nprint('calls', sitecustomize.calls)\n"
#: Asks for GPUs in every way.
ASKING = """
import pynvml, torch
try:
    pynvml.nvmlInit()
except pynvml.NVMLError:
    pass
torch.cuda.is_available()
"""


@dataclass(frozen=True, slots=True)
class Watched:
    """A job whose spawner was watched.

    Attributes:
        python: its interpreter.
        searches: what was looked for by whom.
        result: how it ended.
    """

    python: str
    searches: Searches
    result: Result

    @property
    def calls(self) -> list[str]:
        """The calls that its spawner made, as each of the two ranks tells them."""
        return re.findall(r"^calls (.*)$", self.result.stdout, re.MULTILINE)


def watched(folder: Path, python: str, *words: str, asking: str = "") -> Watched:
    """Runs a job of two ranks with a watched spawner, which does what `asking` says before all else."""
    in_the_spawner(folder, COUNTING + asking)
    searches = Searches(folder)
    environment = searches.environment()
    result = dsrun(folder, RANK + COUNTED, "-n", "2", "train.py", *words, python=python, **environment)
    return Watched(python, searches, result)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("with a config"),
        pytest.param("without a config", marks=pytest.mark.soak("with a config, for which more is imported")),
    ],
)
def quiet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, any_python: str) -> Watched:
    """A job whose spawner does what it always does."""
    folder = tmp_path_factory.mktemp("quiet")
    return watched(folder, any_python, *(config_of(folder) if request.param == "with a config" else []))


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory, any_python: str) -> Watched:
    """A job whose spawner asks for GPUs."""
    return watched(tmp_path_factory.mktemp("loud"), any_python, asking=ASKING)


def test_nothing_before_the_fork_looks_for_a_gpu(quiet: Watched) -> None:
    searches = quiet.searches
    ranks, spawner = started(quiet.result)
    assert searches.of(spawner) == []
    # The front end asks NVML what GPUs there are; the spawner has nothing of that, as it is no fork of it.
    assert searches.of_others(spawner) == {"libnvidia-ml"}
    if is_built_for_cuda(quiet.python) and not DRIVER.exists():
        assert [searches.of(rank) for rank in ranks] == [["libcuda"], ["libcuda"]]


@pytest.mark.skipif(DRIVER.exists(), reason="needs a machine without a GPU: ranks of this spawner are not forked")
def test_a_spawner_that_asks_for_gpus_would_be_seen(loud: Watched) -> None:
    has_cuda = is_built_for_cuda(loud.python)
    _, spawner = started(loud.result, bad_fork=has_cuda)
    assert set(loud.searches.of(spawner)) == {"libnvidia-ml", *(["libcuda"] if has_cuda else [])}


def test_nothing_before_the_fork_calls_what_opens_a_gpu(quiet: Watched) -> None:
    assert quiet.calls == ["[]", "[]"], quiet.result.stderr


def test_a_call_of_what_opens_a_gpu_would_be_counted(loud: Watched) -> None:
    assert loud.calls, loud.result.stderr
    assert all("'is_available'" in calls for calls in loud.calls), loud.result.stdout


HOW = "print(b'dsrun.launcher.agent.start.spawner' in open('/proc/self/cmdline', 'rb').read())\n"


def test_a_profiler_that_starts_with_torch_is_left_to_the_ranks_and_said(tmp_path: Path) -> None:
    script = "import os\nprint(os.environ['KINETO_USE_DAEMON'])\n" + HOW
    result = dsrun(tmp_path, script, "-n", "1", "train.py", KINETO_USE_DAEMON="1")
    assert (result.exit_code, result.stdout) == (0, "1\nFalse\n"), result.stderr
    note = "KINETO_USE_DAEMON is set, which opens the GPU while torch is imported: each rank imports torch itself"
    assert note in result.stderr


def test_ranks_are_not_forked_from_an_import_that_opened_a_gpu(tmp_path: Path) -> None:
    # What a `.pth` file or a `sitecustomize` that trains something would leave.
    in_the_spawner(tmp_path, "import torch\ntorch.cuda._initialized = True\n")
    result = dsrun(tmp_path, HOW, "-n", "1", "train.py")
    assert (result.exit_code, result.stdout) == (0, "False\n"), result.stderr
    assert "the import of torch opened CUDA: each rank imports torch itself, as with `--start exec`" in result.stderr


ON_A_GPU = """
import os, sys
assert b"dsrun.launcher.agent.start.spawner" in open("/proc/self/cmdline", "rb").read(), "this rank is forked"
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
assert not [file for file in files if file.startswith("/dev/nvidia")], files
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch
assert "torch._dynamo" in sys.modules
assert not torch.cuda.is_initialized()
print(torch.zeros(1, device="cuda").item(), torch.cuda.memory_snapshot()[0]["is_expandable"])
"""


# With a config more is imported before the fork than without one.
@pytest.mark.cuda
@pytest.mark.gpu_seconds(9)
@pytest.mark.parametrize("config", ["with a config"], indirect=True)
def test_a_forked_rank_uses_the_gpu_and_its_allocators_settings(tmp_path: Path, config: list[str]) -> None:
    result = dsrun(tmp_path, ON_A_GPU, "-n", "1", "train.py", *config)
    assert (result.exit_code, result.stdout) == (0, "0.0 True\n"), result.stderr


LEVEL = """
import os
os.environ["TORCH_LOGS"] = "+dynamo"
import torch
import logging
print(logging.getLogger("torch._dynamo").level == logging.DEBUG)
"""
EXEC = "train.py:3: TORCH_LOGS is set before torch is imported: each rank imports torch itself (`--start exec`)"
LATE = "dsrun: TORCH_LOGS was set after the start had imported torch, which may have read it by then: use "


@pytest.mark.parametrize(
    ("words", "env", "honoured", "said"),
    [
        pytest.param([], {}, True, EXEC, id="by an interpreter each"),
        pytest.param(
            ["--start", "exec"], {}, True, "", id="as asked", marks=pytest.mark.soak("what the start chooses by itself")
        ),
        pytest.param(["--start", "fork"], {}, False, LATE, id="forked"),
        pytest.param(["--start", "fork", "--env", "TORCH_LOGS=+dynamo"], {}, True, "", id="given to the start"),
    ],
)
def test_what_torch_reads_at_import_is_honoured_or_the_start_says_so(
    tmp_path: Path, words: list[str], env: dict[str, str], honoured: bool, said: str
) -> None:
    result = dsrun(tmp_path, LEVEL, "-n", "1", *words, "train.py", **env)
    assert (result.exit_code, result.stdout) == (0, f"{honoured}\n"), result.stderr
    assert said in result.stderr
    assert ("TORCH_LOGS" in result.stderr) == bool(said)


def test_what_an_imported_module_sets_is_said_by_name(tmp_path: Path, config: list[str]) -> None:
    (tmp_path / "settings.py").write_text(
        "import os\n"
        "os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\n"
        "os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', '/x')\n"
    )
    script = (
        "import settings, os, torch\nprint(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "from torch._inductor import config\nprint(config.max_autotune)\n"
    )
    result = dsrun(tmp_path, script, "-n", "1", "train.py", *config)
    # Without a config nothing has read it before.
    assert result.stdout == f"/x\n{not config}\n", result.stderr
    assert ("TORCHINDUCTOR_MAX_AUTOTUNE was set after the start had imported torch" in result.stderr) == bool(config)
    assert "TORCHINDUCTOR_CACHE_DIR" not in result.stderr


HONOURED = (
    """
import os
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["OMP_NUM_THREADS"] = "3"
for name in ("NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING", "TOKENIZERS_PARALLELISM"):
    os.environ[name] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch.distributed
print(torch.distributed.get_debug_level().name, torch.get_num_threads())
"""
    + HOW
)


def test_what_torch_can_be_told_later_is_told_and_what_it_reads_later_makes_no_noise(tmp_path: Path) -> None:
    result = dsrun(tmp_path, HONOURED, "-n", "1", "train.py")
    assert (result.exit_code, result.stdout) == (0, "DETAIL 3\nTrue\n"), result.stderr
    # The first line says what is run, the last how it ended.
    assert len(result.stderr.splitlines()) == 2, result.stderr
