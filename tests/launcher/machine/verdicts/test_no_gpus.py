"""Jobs that would go without GPUs are told so once: why they fail, or train on the CPU, and what hides them."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.devices.unusable import UnusableGpus
from dsrun.launcher.machine.verdict import Context
from dsrun.launcher.machine.verdicts.no_gpus import hidden_gpu_verdicts, no_gpu_verdicts

BROKEN = UnusableGpus(text="the GPUs of this machine cannot be used: Unknown Error", fix="reboot")
IDLE = "the host has 8 NVIDIA GPUs, and this container was given none"


@pytest.mark.parametrize("context", [Context(), Context(trains=True)])
def test_gpus_that_cannot_be_used_fail_every_job(context: Context) -> None:
    (found,) = no_gpu_verdicts(BROKEN, IDLE, context=context)
    assert (found.level, found.text, found.fix) == ("red", BROKEN.text, BROKEN.fix)
    assert found.path == "gpus_unusable.text"


@pytest.mark.parametrize(("context", "level"), [(Context(), "note"), (Context(trains=True), "amber")])
def test_gpus_that_nobody_gave_are_told_louder_to_who_trains(context: Context, level: str) -> None:
    (found,) = no_gpu_verdicts(None, IDLE, context=context)
    assert (found.level, found.text, found.path) == (level, f"{IDLE}: jobs train on the CPU", "gpus_idle")
    assert "`--no-gpu`" in found.fix


def test_a_machine_without_gpus_goes_without_nothing() -> None:
    assert list(no_gpu_verdicts(None, None, context=Context(trains=True))) == []


def test_a_variable_that_hides_every_gpu_is_named() -> None:
    (found,) = hidden_gpu_verdicts(gpus=2, usable=0, variables=["CUDA_VISIBLE_DEVICES"], unusable=None)
    assert (found.level, found.text) == ("amber", "CUDA_VISIBLE_DEVICES hides every GPU from jobs")
    assert found.fix == "`unset CUDA_VISIBLE_DEVICES`"


@pytest.mark.parametrize(
    ("gpus", "usable", "variables", "unusable"),
    [
        (0, 0, ["CUDA_VISIBLE_DEVICES"], None),
        (2, 1, ["CUDA_VISIBLE_DEVICES"], None),
        # What hides them says so itself.
        (2, 0, [], None),
        (2, 0, ["CUDA_VISIBLE_DEVICES"], BROKEN),
    ],
)
def test_a_variable_that_hides_nothing_is_not_blamed(
    gpus: int, usable: int, variables: list[str], unusable: UnusableGpus | None
) -> None:
    assert list(hidden_gpu_verdicts(gpus=gpus, usable=usable, variables=variables, unusable=unusable)) == []
