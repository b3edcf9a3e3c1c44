"""A host tells what preflight compares, at once and without torch, and says in words what it cannot find."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.machine.limits import read_process_limits
from dsrun.launcher.preflight.facts import HostFacts, facts, read_facts
from dsrun.launcher.preflight.file_facts import file_facts
from support.machines import recorded_machine
from support.nvml import GIB, Part, box, made_up_nvml


def asked(folder: str | None = None, script: str | None = None, *paths: str) -> HostFacts:
    files = {} if script is None else {"script": script}
    arguments: dict[str, Any] = {"folder": folder, "files": files, "code": True, "paths": list(paths), "env": {}}
    with ExitStack() as keep:
        # As it comes over a channel.
        return HostFacts.from_json(json.loads(json.dumps(facts(arguments, keep))))


def test_what_is_asked_for_is_told_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    found = asked(str(tmp_path), "train.py", "out/checkpoints")
    assert found.folder_fault is None
    assert 0 < (found.folder_free_bytes or 0) < shutil.disk_usage(tmp_path).total
    assert found.files == {"script": file_facts(str(tmp_path / "train.py"))}
    assert list(found.code or {}) == ["train.py"]
    (path,) = found.paths
    assert (path.path, path.there, path.fault) == (f"{tmp_path}/out/checkpoints", str(tmp_path), None)
    assert found.versions.python_path == sys.executable
    assert found.versions.torch is not None
    assert found.memory.limit_bytes
    assert found.limits == read_process_limits(Path("/"))
    assert found.asked_s <= found.answered_s


def test_what_is_missing_is_said_in_words(tmp_path: Path) -> None:
    found = asked(str(tmp_path / "gone"), "train.py")
    assert found.folder_fault == f"{tmp_path}/gone: no such file or directory"
    assert found.folder_free_bytes is None
    assert found.files["script"].fault == f"{tmp_path}/gone/train.py: no such file or directory"
    (tmp_path / "file").write_text("")
    assert asked(str(tmp_path / "file")).folder_fault == f"{tmp_path}/file: not a directory"
    assert asked().folder_fault is None


def test_gpus_come_with_who_is_on_them() -> None:
    load = made_up_nvml(*box(3, g1=[(4242, 9 * GIB)]))
    found = read_facts({"CUDA_VISIBLE_DEVICES": "2,1"}, asked_s=0, load_nvml=load)
    assert [(gpu.index, gpu.label, bool(gpu.used_by)) for gpu in found.gpus] == [
        (2, "GPU 2", False),
        (1, "GPU 1", True),
    ]
    assert found.gpus[1].used_by[0].startswith("pid 4242")
    assert found.no_gpus is None


def test_gpus_are_placed_whatever_a_job_sees_of_them(tmp_path: Path) -> None:
    machine = recorded_machine("hgx_h200_job", tmp_path)
    found = read_facts({"CUDA_VISIBLE_DEVICES": "3"}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert [place.address for place in found.gpu_places] == [gpu.pci_address for gpu in machine.report().gpus]
    there = HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found))))
    assert (there.gpu_places, len(there.gpus)) == (found.gpu_places, 1)


def test_slices_are_devices_without_a_number() -> None:
    gpu = Part("GPU-0", slices=[Part("MIG-1"), Part("MIG-2")])
    found = read_facts({}, asked_s=0, load_nvml=made_up_nvml(gpu))
    assert [(gpu.index, gpu.label) for gpu in found.gpus] == [(None, "slice 0 of GPU 0"), (None, "slice 1 of GPU 0")]


def test_without_gpus_it_says_why() -> None:
    hidden = read_facts({"CUDA_VISIBLE_DEVICES": ""}, asked_s=0, load_nvml=made_up_nvml(*box(1)))
    assert (hidden.gpus, hidden.no_gpus) == ((), "CUDA_VISIBLE_DEVICES hides all of them")


@pytest.mark.parametrize("name", ["LibRmVersionMismatch", "DriverNotLoaded"])
def test_a_driver_that_fails_is_told_with_its_way_out(tmp_path: Path, name: str) -> None:
    machine = recorded_machine("workstation", tmp_path, driver_fails=name)
    found = read_facts({}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert found.gpus == ()
    assert found.no_gpus is not None
    assert found.gpus_unusable is not None
    assert HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found)))).gpus_unusable == found.gpus_unusable
    hidden = read_facts({"CUDA_VISIBLE_DEVICES": ""}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert hidden.gpus_unusable is None


def test_accelerators_of_another_maker_are_told_by_name(tmp_path: Path) -> None:
    machine = recorded_machine("mi300x", tmp_path)
    found = read_facts({}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert found.no_gpus == "this machine has 8 AMD GPUs; dsrun trains on GPUs of NVIDIA, and on CPUs"
    assert found.gpus_unusable is not None


def test_a_gpu_that_is_lost_is_told_beside_those_that_are_left(tmp_path: Path) -> None:
    machine = recorded_machine("workstation", tmp_path, lost=[1])
    found = read_facts({}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert [gpu.index for gpu in found.gpus] == [0, 2, 3]
    assert found.left_out == ("GPU 1 is left out: GPU is lost; it needs a reset or a reboot",)
    assert found.no_gpus is None


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from contextlib import ExitStack; from dsrun.launcher.preflight.facts import facts;"
        "facts({'folder': None, 'files': {}, 'code': True, 'paths': [], 'env': {}}, ExitStack());"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'click', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
