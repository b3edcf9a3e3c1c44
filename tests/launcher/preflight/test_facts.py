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

from dsrun.launcher.machine.known_fields import known_fields
from dsrun.launcher.machine.limits import LimitsReport, read_process_limits
from dsrun.launcher.machine.storage import room_of
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
    assert [(one.gpu and one.gpu.index, one.device.label, bool(one.device.used_by)) for one in found.gpus] == [
        (2, "GPU 2", False),
        (1, "GPU 1", True),
    ]
    assert found.gpus[1].device.used_by[0].startswith("pid 4242")
    assert found.no_gpus is None
    assert HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found)))).gpus == found.gpus


def test_gpus_are_placed_whatever_a_job_sees_of_them(tmp_path: Path) -> None:
    machine = recorded_machine("hgx_h200_job", tmp_path)
    found = read_facts({"CUDA_VISIBLE_DEVICES": "3"}, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    assert [place.address for place in found.gpu_places] == [gpu.pci_address for gpu in machine.report().gpus]
    there = HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found))))
    assert (there.gpu_places, len(there.gpus)) == (found.gpu_places, 1)


def test_cards_come_with_what_nccl_takes_and_who_chose_it(tmp_path: Path) -> None:
    machine = recorded_machine("azure_nd_h100_v5", tmp_path)
    sockets = {"NCCL_NET": "Socket"}
    found, told = (
        read_facts(environ, asked_s=0, load_nvml=machine.load_nvml, root=machine.root) for environ in ({}, sockets)
    )
    assert (found.rdma, len(found.ports)) == (machine.report().rdma, 9)
    assert (found.no_sockets, found.net_variables) == ("mlx5_an0 does RDMA", ())
    assert (told.no_sockets, told.net_variables) == (None, ("NCCL_NET",))
    there = HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(told))))
    assert (there.rdma, there.net_variables) == (told.rdma, told.net_variables)


@pytest.mark.parametrize(
    "path",
    [
        "gpus.0.gpu",
        "gpus.0.device",
        "rdma.0",
        "rdma.0.ports.0",
        "paths.0",
        "versions",
        "memory",
        "limits",
        "left_out.0",
    ],
)
def test_an_answer_with_other_fields_of_a_thing_is_understood(tmp_path: Path, path: str) -> None:
    machine = recorded_machine("azure_nd_h100_v5", tmp_path, lost=[7])
    paths = (room_of(str(tmp_path)),)
    found = read_facts({}, paths=paths, asked_s=0, load_nvml=machine.load_nvml, root=machine.root)
    value = json.loads(json.dumps(dataclasses.asdict(found)))
    part = value
    for word in path.split("."):
        part = part[int(word)] if isinstance(part, list) else part[word]
    part["tells_more"] = {"in": "another version"}
    assert HostFacts.from_json(value) == HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found))))
    missing = {"gpu": "uuid", "rdma.0": "firmware", "ports.0": "symbol_errors", "versions": "nccl"}
    name = next((name for end, name in missing.items() if path.endswith(end)), None)
    if name is not None:
        del part[name]
        there = json.loads(json.dumps(dataclasses.asdict(HostFacts.from_json(value))))
        for word in path.split("."):
            there = there[int(word)] if isinstance(there, list) else there[word]
        assert there[name] is None


def test_a_field_that_is_missing_has_its_default() -> None:
    limits = known_fields(LimitsReport, {"nofile": 1024, "tells_more": 1})
    assert "tells_more" not in limits
    found = LimitsReport(**limits)
    assert (found.nofile, found.memlock_bytes, found.locks_without_limit) == (1024, None, False)


def test_slices_are_devices_without_a_number() -> None:
    gpu = Part("GPU-0", slices=[Part("MIG-1"), Part("MIG-2")])
    found = read_facts({}, asked_s=0, load_nvml=made_up_nvml(gpu))
    assert [(one.gpu, one.device.label) for one in found.gpus] == [
        (None, "slice 0 of GPU 0"),
        (None, "slice 1 of GPU 0"),
    ]


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
    assert [one.gpu and one.gpu.index for one in found.gpus] == [0, 2, 3]
    (lost,) = found.left_out
    assert (lost.kind, lost.gpus) == ("lost", (1,))
    assert lost.text == "GPU 1 left out: the driver counts it and cannot reach it (GPU is lost)"
    assert HostFacts.from_json(json.loads(json.dumps(dataclasses.asdict(found)))).left_out == found.left_out
    assert found.no_gpus is None


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from contextlib import ExitStack; from dsrun.launcher.preflight.facts import facts;"
        "facts({'folder': None, 'files': {}, 'code': True, 'paths': [], 'env': {}}, ExitStack());"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'click', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
