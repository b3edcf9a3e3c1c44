from __future__ import annotations

from typing import Any

import pytest

from dsrun.launcher.machine.provenance import Provenance, provenance, source_of

REPORT: dict[str, Any] = {
    "cpu": {"model": None, "isa": ["avx2"]},
    "gpus": [{"usable": True, "state": {"power_limit_w": 700.0}}],
    "measured": {"memory_copy": {"gb_s": 12.5}},
    "null_reasons": {"cpu.model": "/proc/cpuinfo does not name it"},
}


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("gpus.0.state.power_limit_w", Provenance(source="NVML", confidence="reported", reason=None)),
        ("gpus.0.usable", Provenance(source="NVML, CUDA_VISIBLE_DEVICES", confidence="reported", reason=None)),
        ("cpu.isa.0", Provenance(source="/proc/cpuinfo", confidence="reported", reason=None)),
        (
            "cpu.model",
            Provenance(source="/proc/cpuinfo", confidence="unknown", reason="/proc/cpuinfo does not name it"),
        ),
        ("measured.memory_copy.gb_s", Provenance(source="dsrun probe --bench", confidence="measured", reason=None)),
    ],
)
def test_a_value_is_measured_reported_or_unknown_and_has_a_source(path: str, known: Provenance) -> None:
    assert provenance(REPORT, path) == known


@pytest.mark.parametrize("path", ["gpus.1.usable", "gpus.x", "cpu.sockets", "nothing"])
def test_a_value_that_is_not_in_the_report_is_an_error(path: str) -> None:
    with pytest.raises(KeyError):
        provenance(REPORT, path)


def test_what_has_no_source_is_said_to_have_none() -> None:
    assert source_of("schema_version") == ""
