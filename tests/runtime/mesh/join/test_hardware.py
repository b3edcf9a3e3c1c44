"""Where nobody said on what to train, an accelerator that does not serve is an error and not a job on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from dsrun.errors import InputError
from dsrun.runtime.mesh.join.hardware import TorchDevices, has_gpu, torch_devices
from support.cli import clean_environment
from support.torch_builds import cuda_build


def seen(
    cuda: str | None = None, hip: str | None = None, *, available: bool = False, other: str | None = None
) -> TorchDevices:
    return TorchDevices(cuda=cuda, hip=hip, is_available=available, other=other)


def test_a_gpu_of_nvidias_is_trained_on() -> None:
    assert has_gpu(seen("13.0", available=True), is_given=lambda: pytest.fail("looked for"))


@pytest.mark.parametrize("devices", [seen(), seen("13.0")])
def test_a_process_that_was_given_no_gpu_trains_on_the_cpu(devices: TorchDevices) -> None:
    assert not has_gpu(devices, is_given=lambda: False)


def test_a_cpu_build_of_torch_is_a_choice() -> None:
    assert not has_gpu(seen(), is_given=lambda: True)


def test_a_gpu_that_torch_cannot_use_is_refused_with_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError) as caught:
        has_gpu(seen("13.0"), is_given=lambda: True, reason=lambda: "CUDA unknown error")
    assert caught.value.render() == (
        "error: this process was given a GPU, and torch cannot use it: CUDA unknown error\n"
        'hint: `dsrun doctor` looks for the cause; `--backend gloo`, or `init_distributed("gloo")`, trains on the CPU'
    )


def test_a_choice_of_gpus_is_named_where_torch_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(InputError, match=r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES is `3`\)"):
        has_gpu(seen("13.0"), is_given=lambda: True, reason=lambda: "No CUDA GPUs are available")


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (
            seen(hip="6.4", available=True),
            "torch is built for ROCm 6.4 and sees an AMD GPU; dsrun trains on GPUs of NVIDIA",
        ),
        (seen(other="xpu"), "torch sees an Intel GPU; "),
        (seen(other="mps"), "torch sees Apple's GPU; "),
        (seen(other="hpu"), "torch sees Intel's Gaudi; "),
        (seen(other="privateuseone"), "torch sees a device of type privateuseone; "),
    ],
)
def test_accelerators_of_other_makers_are_refused_by_name(devices: TorchDevices, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        has_gpu(devices, is_given=lambda: False)
    assert "--backend gloo" in (caught.value.hint or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_torch_without_an_accelerator_sees_none() -> None:
    assert torch_devices() == seen(torch.version.cuda, torch.version.hip)
    assert not has_gpu()


def test_a_cuda_build_says_itself_why_it_has_no_gpu() -> None:
    code = (
        "from dsrun.errors import InputError\n"
        "from dsrun.runtime.mesh.join.hardware import has_gpu\n"
        "assert not has_gpu(is_given=lambda: False)\n"
        "try:\n    has_gpu(is_given=lambda: True)\nexcept InputError as error:\n    print(error)\n"
    )
    folders = os.pathsep.join(path for path in sys.path if path.endswith("src"))
    done = subprocess.run(
        [cuda_build(), "-W", "error", "-c", code],
        env=clean_environment() | {"PYTHONPATH": folders, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.fullmatch(r"this process was given a GPU, and torch cannot use it: \w.*\n", done.stdout), done.stderr
