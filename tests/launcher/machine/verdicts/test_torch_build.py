"""A torch that is missing, or built for no GPU beside some, is told by what the job needs of it."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.machine.software.versions import Versions
from dsrun.launcher.machine.verdict import Context, ProbeVerdict
from dsrun.launcher.machine.verdicts.cuda_fit import CudaFit
from dsrun.launcher.machine.verdicts.torch_build import torch_verdicts

OLD = CudaFit(verdict="red", text="driver 550.1 runs up to 12.4", fix="update the driver")
WELL = CudaFit(verdict="green", text="driver 580.1 runs up to 13.0", fix=None)
NEWER = CudaFit(verdict="note", text="runs by forward compatibility", fix=None)
NEEDS_GPUS = Context(trains=True, needs_gpus=True)


def said(
    torch: str | None, cuda: str | None, *, gpus: int = 0, fit: CudaFit | None = None, context: Context | None = None
) -> list[ProbeVerdict]:
    told: dict[str, Any] = dict.fromkeys(Versions.__dataclass_fields__)
    told |= {"python_path": "/opt/py/bin/python", "torch": torch, "cuda": cuda}
    return [*torch_verdicts(Versions(**told), gpus=gpus, fit=fit, context=context or Context())]


@pytest.mark.parametrize(
    ("context", "level", "package"),
    [
        (Context(), "amber", "torch"),
        (Context(trains=True), "red", "torch"),
        (Context(trains=True, torch="2.13.0"), "red", "torch==2.13.0"),
    ],
)
def test_a_missing_torch_fails_jobs_that_train_and_is_installed_as_on_the_other_hosts(
    context: Context, level: str, package: str
) -> None:
    (found,) = said(None, None, gpus=8, context=context)
    assert (found.level, found.path) == (level, "versions.torch")
    assert found.text == "torch is not installed beside Python at /opt/py/bin/python"
    assert found.fix == f"`/opt/py/bin/python -m pip install {package}`"


def test_a_cpu_build_is_told_beside_gpus_and_refused_where_ranks_need_them() -> None:
    (beside,) = said("2.13.0+cpu", None, gpus=8)
    assert (beside.level, beside.path) == ("amber", "versions.cuda")
    text = "torch 2.13.0+cpu is built without CUDA: jobs train on the CPU, and {} idle"
    assert beside.text == text.format("8 GPUs stay")
    assert said("2.13.0+cpu", None, gpus=1)[0].text == text.format("1 GPU stays")
    # Of hosts of one job the text is one, however many GPUs each has.
    (needed,) = said("2.13.0+cpu", None, gpus=8, context=NEEDS_GPUS)
    assert (needed.level, needed.text) == ("red", "torch 2.13.0+cpu is built without CUDA")
    assert "https://pytorch.org/get-started" in needed.fix
    assert "`--backend gloo`" in needed.fix
    assert said("2.13.0+cpu", None, context=NEEDS_GPUS) == [needed]
    assert said("2.13.0+cpu", None) == []


@pytest.mark.parametrize(("fit", "levels"), [(None, []), (WELL, []), (NEWER, ["note"]), (OLD, ["red"])])
def test_a_build_that_does_not_fit_the_driver_is_told_as_it_was_judged(fit: CudaFit | None, levels: list[str]) -> None:
    found = said("2.13.0+cu130", "13.0", gpus=8, fit=fit)
    assert [one.level for one in found] == levels
    assert all(fit is not None and one.text == fit.text and one.fix for one in found)
