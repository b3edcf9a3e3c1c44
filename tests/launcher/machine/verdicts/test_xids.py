"""What an error of the driver's means: red where NVIDIA's catalogue asks for a reset, and not once that has been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.machine.gpus.state import GpuState
from dsrun.launcher.machine.gpus.xids import XidEvent, parse_driver_errors
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.machine.verdicts.gpus import gpu_verdicts
from dsrun.launcher.machine.verdicts.xids import recovery_remarks, switch_verdicts, xid_remarks
from support.machines import recorded_machine


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    """A DGX H100 of which nothing is to be said; a value, so one serves all tests."""
    return recorded_machine("dgx_h100", tmp_path_factory.mktemp("dgx")).report()


def state(dgx: ProbeReport, recovery_action: str | None) -> GpuState:
    found = dgx.gpus[0].state
    assert found is not None
    return replace(found, recovery_action=recovery_action)


def xid(number: int, **values: object) -> XidEvent:
    event = XidEvent(number=number, text="", fatal=None, action=None, age_s=3 * 3600.0 + 59)
    return replace(event, **values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (xid(48), "red Xid 48: double-bit memory error (3 h ago)"),
        (xid(62), "red Xid 62: internal micro-controller halted (3 h ago)"),
        (xid(79, age_s=2 * 86400.0), "red Xid 79: fell off the bus (2 d ago)"),
        (xid(94, age_s=120.0), "amber Xid 94: contained memory error (2 min ago)"),
        (xid(95, age_s=5.0), "red Xid 95: uncontained memory error (just now)"),
        (xid(109, age_s=None), "red Xid 109: context switch timed out"),
        (xid(121), "note Xid 121: errors on the link to the Grace CPU, corrected (3 h ago)"),
        (xid(136), "red Xid 136: NVLink training failed (3 h ago)"),
        (xid(143), "red Xid 143: the GPU could not be initialised (3 h ago)"),
        (xid(149, fatal=True), "red Xid 149: NVLink error (3 h ago)"),
        (xid(145, fatal=False), "note Xid 145: NVLink error (3 h ago)"),
        (xid(150), "amber Xid 150: NVLink error (3 h ago)"),
        (xid(158), "red Xid 158: fatal time-out (3 h ago)"),
        (xid(154, action="Node Reboot Required"), "red needs the machine to be rebooted, says the driver (3 h ago)"),
        (xid(154, action="GPU Reset Required"), "red needs a reset, says the driver (3 h ago)"),
        (
            xid(154, action="Drain and Reset"),
            "amber needs a reset once what runs on it has ended, says the driver (3 h ago)",
        ),
        (
            xid(154, action="Drain P2P"),
            "amber needs its traffic with other GPUs to end, says the driver (3 h ago)",
        ),
        (xid(79, over=True), "note Xid 79: fell off the bus (3 h ago); the driver has recovered since"),
    ],
)
def test_an_error_means_what_the_catalogue_says(event: XidEvent, said: str) -> None:
    ((level, text, fix, path),) = xid_remarks([event], None)
    assert (f"{level} {text}", path) == (said, "xid_events")
    assert fix


@pytest.mark.parametrize("number", [8, 13, 31, 43, 45, 69, 137, 154])
def test_what_a_program_did_itself_and_what_asks_for_nothing_is_not_spoken_of(number: int) -> None:
    assert list(xid_remarks([xid(number)], None)) == []


def test_a_gpu_of_which_the_driver_asks_nothing_now_had_its_error(dgx: ProbeReport) -> None:
    ((level, text, _, _),) = xid_remarks([xid(119)], state(dgx, "none"))
    assert (level, text) == ("amber", "Xid 119: GSP does not answer (3 h ago); the driver asks for nothing now")
    ((level, text, fix, _),) = xid_remarks([xid(63)], state(dgx, "none"))
    assert (level, text) == ("note", "Xid 63: memory row remapped (3 h ago); the driver asks for nothing now")
    assert "nvidia-smi -r" not in fix
    ((level, text, _, _),) = xid_remarks([xid(119)], state(dgx, None))
    assert (level, text) == ("red", "Xid 119: GSP does not answer (3 h ago)")


@pytest.mark.parametrize(
    ("action", "level", "fix"),
    [
        ("reset the GPU", "red", "nvidia-smi -r -i GPU_INDEX"),
        ("reboot the node", "red", "reboot"),
        ("drain and reset", "amber", "nvidia-smi -r -i GPU_INDEX"),
        ("drain peer-to-peer", "amber", "nvidia-smi -q"),
        ("recover the IMEX domain", "red", "nvidia-imex"),
    ],
)
def test_what_the_driver_asks_for_is_said_once(dgx: ProbeReport, action: str, level: str, fix: str) -> None:
    ((found, text, way_out, path),) = recovery_remarks(state(dgx, action))
    assert (found, path) == (level, "state.recovery_action")
    assert text.endswith("says the driver")
    assert fix in way_out
    # Its Xid 154 may be hours old.
    assert list(xid_remarks([xid(154, action="Node Reboot Required")], state(dgx, action))) == []


@pytest.mark.parametrize("action", ["none", None])
def test_a_driver_that_asks_for_nothing_is_not_spoken_of(dgx: ProbeReport, action: str | None) -> None:
    assert list(recovery_remarks(state(dgx, action))) == []


def test_a_fatal_error_of_a_switch_is_red_and_names_it() -> None:
    log = """\
4,1,100000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress non-posted PRIV error (First)
4,2,100000000,-;nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate
"""
    events = parse_driver_errors(log, uptime_s=3700.0).switches
    fatal, mild = switch_verdicts(events, gpus_are_well=False)
    assert (fatal.level, fatal.path) == ("red", "topology.switch_events.0")
    assert fatal.text == (
        "nvswitch3 (0000:c1:00.0) SXid 12028 (1 h ago): Link 32 egress non-posted PRIV error (First): NVLink of all "
        "GPUs here may be gone"
    )
    assert (mild.level, mild.path) == ("note", "topology.switch_events.1")
    assert mild.text == "nvswitch0 (0000:c3:00.0) SXid 20009 (1 h ago): Link 28 RX Short Error Rate (not fatal)"
    # They were reset since.
    fatal, mild = switch_verdicts(events, gpus_are_well=True)
    assert (fatal.level, mild.level) == ("amber", "note")
    assert fatal.text.endswith("PRIV error (First); the driver asks for nothing now")
    past = switch_verdicts([replace(event, over=True) for event in events], gpus_are_well=False)
    assert {(verdict.level, verdict.text.split("; ")[1]) for verdict in past} == {
        ("note", "the driver has recovered since")
    }


@pytest.mark.parametrize(("recovery", "down", "level"), [("none", 0, "amber"), ("none", 1, "red"), (None, 0, "red")])
def test_a_board_whose_gpus_are_well_had_its_error(
    dgx: ProbeReport, recovery: str | None, down: int, level: str
) -> None:
    log = "4,1,1,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress PRIV error\n"
    events = parse_driver_errors(log, uptime_s=None).switches
    links = dgx.gpus[0].nvlink
    assert links is not None
    gpu = replace(dgx.gpus[0], state=state(dgx, recovery), nvlink=replace(links, inactive=down))
    board = replace(dgx, gpus=(gpu,) * 8, topology=replace(dgx.topology, switch_events=events))
    assert [verdict.level for verdict in gpu_verdicts(board) if "nvswitch3" in verdict.text] == [level]


def test_errors_in_the_log_of_a_machine_come_to_its_verdicts(tmp_path: Path) -> None:
    machine = recorded_machine("dgx_h100", tmp_path)
    (tmp_path / "dev/kmsg").write_text(
        "4,1,863999000000,-;NVRM: Xid (PCI:0000:9d:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node "
        "Reboot Required)\n"
        "4,2,863999000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 PRIV error\n"
    )
    report = machine.report()
    assert [verdict.text for verdict in gpu_verdicts(report)] == [
        "nvswitch3 (0000:c1:00.0) SXid 12028 (just now): Link 32 PRIV error: NVLink of all GPUs here may be gone",
        "GPU 4 needs the machine to be rebooted, says the driver (just now)",
    ]
    assert report.gpus[4].xids == (154,)
