"""The table of variables is compared with what an import of torch really reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.launcher.plan.import_variables import HONOURED, is_read_at_import
from support.torch_builds import cuda_build


@pytest.fixture(params=["this build", "CUDA build"])
def python(request: pytest.FixtureRequest) -> str:
    return sys.executable if request.param == "this build" else cuda_build()


#: Prints the names that torch's own modules read from `os.environ` while they are imported: those of
#: `torch.distributed`, then those that `torch._dynamo` adds. What other modules read for torch (a home folder, a user's
#: name) is theirs.
RECORD = """
import json, os, sys
names = {}
mapping = type(os.environ)
read = mapping.__getitem__
def record(self, name):
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>", __file__):
        frame = frame.f_back
    if frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        names[name] = None
    return read(self, name)
def contains(self, name):
    try:
        record(self, name)
    except KeyError:
        return False
    return True
mapping.__getitem__, mapping.__contains__ = record, contains
import torch.distributed
first = list(names)
import torch._dynamo
json.dump([first, list(names)], sys.stdout)
"""
#: Read at import, and again whenever they are used.
READ_AGAIN = {"TORCHINDUCTOR_CACHE_DIR"}


def test_what_torch_reads_in_python_while_it_is_imported_is_in_the_table(tmp_path: Path, python: str) -> None:
    script = tmp_path / "record.py"
    script.write_text(RECORD)
    shown = subprocess.run(
        [python, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    first, both = (set(names) - HONOURED - READ_AGAIN for names in json.loads(shown.stdout))
    assert {"TORCH_LOGS", "TORCH_TRACE"} <= first
    assert {"TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_COMPILE_DISABLE"} <= both - first
    assert [name for name in sorted(first) if not is_read_at_import(name, compiler=False)] == []
    assert [name for name in sorted(both) if not is_read_at_import(name)] == []


#: Writes which library asks for which variable.
GETENV = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
typedef char *(*asks)(const char *);
static char *ask(const char *function, const char *name, void *caller) {
    asks next = (asks)dlsym(RTLD_NEXT, function);
    static int file = -1;
    if (file < 0) file = open(next("GETENV_RECORD"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    Dl_info place = {0};
    dladdr(caller, &place);
    dprintf(file, "%s %s\n", place.dli_fname ? place.dli_fname : "?", name);
    return next(name);
}
char *getenv(const char *name) { return ask("getenv", name, __builtin_return_address(0)); }
char *secure_getenv(const char *name) { return ask("secure_getenv", name, __builtin_return_address(0)); }
"""
#: What the math libraries inside torch ask of MPI and of Intel's profiler: nobody sets them in a script.
FOREIGN = ("I_MPI_", "MPI_", "OMPI_", "INTEL_")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_torch_reads_in_c_while_it_is_loaded_is_in_the_table(tmp_path: Path, python: str) -> None:
    (tmp_path / "getenv.c").write_text(GETENV)
    library, record = tmp_path / "getenv.so", tmp_path / "record"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "getenv.c", "-ldl"], timeout=60, check=True)
    subprocess.run(
        [python, "-W", "ignore", "-c", "import torch.distributed, torch._dynamo"],
        env={**os.environ, "LD_PRELOAD": str(library), "GETENV_RECORD": str(record)},
        timeout=120,
        check=True,
    )
    rows = (line.rpartition(" ") for line in record.read_text().splitlines())
    ours = ("libc10", "libtorch", "libgomp", "libscipy_openblas")
    asked = {name for file, _, name in rows if os.path.basename(file).startswith(ours)}
    assert asked >= HONOURED
    asked -= HONOURED
    missing = [name for name in sorted(asked) if not is_read_at_import(name, "backend:x", compiler=False)]
    assert [name for name in missing if not name.startswith((*FOREIGN, "ACC_", "GOTO_"))] == []


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "HF_HOME"),
        *("TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG", "TORCHELASTIC_RUN_ID", "TORCH_HOME", "OMP_NUM_THREADS"),
    ],
)
def test_what_is_read_where_it_is_used_is_not_late(name: str) -> None:
    assert not is_read_at_import(name, "1")


@pytest.mark.parametrize(
    "name",
    [
        *("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_VERBOSE"),
        *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_MAX_AUTOTUNE", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *(
            "KMP_AFFINITY",
            "KMP_BLOCKTIME",
            "OMP_PROC_BIND",
            "GOMP_CPU_AFFINITY",
            "PYTORCH_JIT",
            "TORCH_SHOW_CPP_STACKTRACES",
        ),
    ],
)
def test_what_scripts_set_and_an_import_reads_counts_as_late(name: str) -> None:
    assert is_read_at_import(name, "1")


def test_of_the_allocators_settings_the_choice_of_the_allocator_alone_is_made_at_import() -> None:
    assert not is_read_at_import("PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True")
    assert is_read_at_import("PYTORCH_CUDA_ALLOC_CONF", None, "backend:cudaMallocAsync")
    assert is_read_at_import("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", None)


#: Sets the allocator's settings after the import, wrongly: whoever reads them then refuses them.
LATER = """
import os, torch
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:1"
try:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
except Exception as error:
    print("max_split_size_mb" in str(error))
"""


def test_the_allocators_other_settings_are_read_when_the_first_is_needed() -> None:
    shown = subprocess.run(
        [cuda_build(), "-W", "ignore", "-c", LATER], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout == "True\n"
