from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from dsrun.launcher.machine.gpus.state import read_state, throttle_words
from dsrun.launcher.machine.gpus.users import GpuProcess
from support.machines import recorded_machine
from support.nvml import GIB, Part, made_up_nvml


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, None),
        (0, ()),
        (1, ()),
        (0x2, ()),
        (0x4 | 0x40, ("power cap", "thermal (hardware)")),
        (0x8 | 0x80, ("hardware slowdown", "power brake")),
    ],
)
def test_what_holds_clocks_down_is_said_in_words_and_idling_is_not_that(
    mask: int | None, words: tuple[str, ...] | None
) -> None:
    assert throttle_words(mask) == words


def test_a_gpu_is_told_with_power_clocks_heat_and_modes(tmp_path: Path) -> None:
    state = recorded_machine("dgx_h100", tmp_path).report().gpus[0].state
    assert state is not None
    assert (state.power_draw_w, state.power_limit_w, state.power_limit_default_w) == (71, 700, 700)
    assert (state.sm_clock_mhz, state.sm_clock_max_mhz, state.memory_clock_mhz) == (345, 1980, 2619)
    assert (state.temperature_c, state.persistence, state.compute_mode, state.bar1_bytes) == (
        31,
        True,
        "default",
        128 * GIB,
    )
    assert (state.ecc_enabled, state.ecc_uncorrected, state.throttle_reasons) == (True, 0, ())


def test_memory_that_broke_is_counted(tmp_path: Path) -> None:
    state = recorded_machine("l40s_pcie", tmp_path).report().gpus[7].state
    assert state is not None
    assert (state.remapped_rows, state.remap_pending, state.remap_failed, state.ecc_uncorrected) == (3, True, False, 3)


def test_a_gpu_without_such_a_thing_says_nothing_of_it(tmp_path: Path) -> None:
    state = recorded_machine("workstation", tmp_path).report().gpus[0].state
    assert state is not None
    assert (state.ecc_enabled, state.remapped_rows, state.remap_failed, state.mig_enabled) == (False, None, None, None)


def test_processes_are_told_with_their_users() -> None:
    nvml = made_up_nvml(Part(uuid="GPU-0", processes=[(7, GIB), (8, None)]))()
    state = read_state(nvml, nvml.nvmlDeviceGetHandleByIndex(0), user_of={7: "bob"}.get)
    assert state.processes == (
        GpuProcess(pid=7, user="bob", memory_bytes=GIB),
        GpuProcess(pid=8, user=None, memory_bytes=None),
    )


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (None, None),
        (0, "none"),
        (2, "reboot the node"),
        (7, "reboot the system"),
        (99, None),
        (1 << 40 | 4, "drain and reset"),
    ],
)
def test_what_the_driver_asks_to_be_done_with_a_gpu_is_told(answer: int | None, action: str | None) -> None:
    def fields(handle: int, ids: list[int]) -> list[SimpleNamespace]:
        assert ids == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        value = SimpleNamespace(ullVal=answer)
        return [SimpleNamespace(fieldId=ids[0], nvmlReturn=3 if answer is None else 0, value=value)]

    nvml = SimpleNamespace(NVMLError=RuntimeError, nvmlDeviceGetFieldValues=fields)
    assert read_state(nvml, 0, user_of=lambda pid: None).recovery_action == action


def test_slices_of_a_gpu_in_mig_mode_are_told() -> None:
    nvml = made_up_nvml(Part(uuid="GPU-0", slices=[Part(uuid="MIG-a"), Part(uuid="MIG-b")]))()
    state = read_state(nvml, nvml.nvmlDeviceGetHandleByIndex(0), user_of=lambda pid: None)
    assert state.mig_enabled is True
    assert [part.uuid for part in state.mig_slices] == ["MIG-a", "MIG-b"]
    assert state.mig_slices[0].memory_total_bytes == 80 * GIB


def test_an_old_pynvml_that_knows_no_question_leaves_every_value_open() -> None:
    state = read_state(SimpleNamespace(NVMLError=RuntimeError), 0, user_of=lambda pid: None)
    values = [getattr(state, name) for name in state.__dataclass_fields__]
    assert [value for value in values if value not in (None, ())] == []
