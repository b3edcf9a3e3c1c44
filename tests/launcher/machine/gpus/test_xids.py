from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.machine.gpus.xids import (
    DriverErrors,
    SwitchEvent,
    XidEvent,
    parse_driver_errors,
    read_driver_errors,
)
from support.topologies import write_tree

LOG = """\
4,1,10,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module
4,2,11,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=99, name=python, Ch 00000008
4,3,12,-;NVRM: Xid (PCI:0000:DF:00.0): 79, pid='<unknown>', GPU has fallen off the bus.
4,4,13,-;NVRM: Xid (PCI:0000:1b:00): 94, pid=99
"""


def parsed(*lines: str) -> DriverErrors:
    """Reads lines that came a second after each other, 100 s after boot, an hour ago."""
    log = "".join(f"4,{number},{(100 + number) * 1_000_000},-;{line}\n" for number, line in enumerate(lines))
    return parse_driver_errors(log, uptime_s=3700.0)


def event(number: int, text: str = "", *, age_s: float | None = 3600.0, **values: bool | str | None) -> XidEvent:
    return XidEvent(**{"number": number, "text": text, "fatal": None, "action": None, "age_s": age_s, **values})  # pyright: ignore[reportArgumentType]


def test_errors_are_told_by_the_address_of_the_gpu_in_their_order() -> None:
    assert parse_driver_errors(LOG, uptime_s=None).xids == {"0000:1b:00.0": (31, 94), "0000:df:00.0": (79,)}
    assert parse_driver_errors("", uptime_s=1.0) == DriverErrors(xids={}, events={}, switches=())


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No", 94),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:01 GPU-CI:02): 13, pid=7, Graphics Exception", 13),
        ("NVRM: Xid (0000:01:00): 48, Double bit error", 48),
        ("NVRM: Xid (PCI:0000:01:00): 119, Timeout after 6s of waiting for RPC response from GPU0 GSP!", 119),
        ("NVRM: Xid (PCI:0000:01:00): 92", 92),
    ],
)
def test_an_error_is_read_in_every_form_in_which_drivers_write_it(line: str, number: int) -> None:
    assert parsed(line).xids == {"0000:01:00.0": (number,)}


def test_an_error_has_its_age_and_the_drivers_words() -> None:
    text = "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)"
    mild = "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001)"
    found = parsed(f"NVRM: Xid (PCI:0018:01:00): 149, {text}", f"NVRM: Xid (PCI:0018:01:00): 145, {mild}").events
    assert found == {"0018:01:00.0": (event(149, text, fatal=True), event(145, mild, fatal=False, age_s=3599.0))}


def test_of_the_same_errors_the_last_is_told() -> None:
    found = parsed(*["NVRM: Xid (PCI:0000:01:00): 48, DBE"] * 3)
    assert found.xids == {"0000:01:00.0": (48, 48, 48)}
    assert found.events == {"0000:01:00.0": (event(48, "DBE", age_s=3598.0),)}


def test_errors_before_the_driver_was_loaded_anew_are_over() -> None:
    found = parsed(
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress non-posted PRIV error (First)",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build",
        "NVRM: Xid (PCI:0000:02:00): 48, DBE",
    )
    assert [(its.number, its.over) for events in found.events.values() for its in events] == [(79, True), (48, False)]
    assert [its.over for its in found.switches] == [True]


def test_what_the_driver_asks_for_ends_the_errors_before_once_it_asks_for_nothing() -> None:
    reset = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    asked = parsed("NVRM: Xid (PCI:0000:01:00): 95, UNCONTAINED", f"NVRM: Xid (PCI:0000:01:00): 154, {reset}")
    assert asked.events["0000:01:00.0"][1] == event(154, reset, action="GPU Reset Required", age_s=3599.0)
    back = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    done = parsed(
        "NVRM: Xid (PCI:0000:01:00): 95, UNCONTAINED",
        "NVRM: Xid (PCI:0000:02:00): 95, UNCONTAINED",
        f"NVRM: Xid (PCI:0000:01:00): 154, {reset}",
        f"NVRM: Xid (PCI:0000:01:00): 154, {back}",
    )
    over = [(address, its.number, its.over) for address, events in done.events.items() for its in events]
    assert over == [("0000:01:00.0", 95, True), ("0000:01:00.0", 154, True), ("0000:02:00.0", 95, False)]


def test_errors_of_switches_are_told_by_switch_without_their_lines_of_details() -> None:
    found = parsed(
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress non-posted PRIV error (First)",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Severity 1 Engine instance 32 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Data {0x50610002, 0x10100030, 0x00000000}",
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
    ).switches
    assert found == (
        SwitchEvent(
            name="nvswitch3",
            address="0000:c1:00.0",
            number=12028,
            text="Link 32 egress non-posted PRIV error (First)",
            fatal=True,
            age_s=3600.0,
        ),
        SwitchEvent(
            name="nvswitch0",
            address="0000:c3:00.0",
            number=20009,
            text="Link 28 RX Short Error Rate",
            fatal=False,
            age_s=3597.0,
        ),
    )


def test_the_log_is_read_to_its_end(tmp_path: Path) -> None:
    write_tree(tmp_path, {"dev/kmsg": LOG * 2000, "proc/uptime": "60.5 12.0\n"})
    found = read_driver_errors(tmp_path)
    assert isinstance(found, DriverErrors)
    assert len(found.xids["0000:1b:00.0"]) == 4000
    assert found.events["0000:df:00.0"][0].age_s == pytest.approx(60.5, abs=0.001)


def test_a_log_with_nothing_new_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    writer = os.open(tmp_path / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, LOG.encode())
        assert read_driver_errors(tmp_path) == parse_driver_errors(LOG, uptime_s=None)
    finally:
        os.close(writer)


def test_a_log_that_may_not_be_read_is_a_reason(tmp_path: Path) -> None:
    assert read_driver_errors(tmp_path) == "/dev/kmsg: no such file or directory"


def test_an_error_that_is_yet_to_come_has_no_age() -> None:
    """In a container with an uptime of its own it would have been just now."""
    log = "4,1,5000000000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    ages = [parse_driver_errors(log, uptime_s=uptime_s).events["0000:1b:00.0"][0].age_s for uptime_s in (100, 4990)]
    assert ages == [None, 0.0]
