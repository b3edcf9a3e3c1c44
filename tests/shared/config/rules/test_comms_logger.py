from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Finding, Severity
from dsrun.config.load import inspect, load


def findings(section: dict[str, Any]) -> list[Finding]:
    given = {"train_micro_batch_size_per_gpu": 1, "comms_logger": {"enabled": True, **section}}
    return [each for each in inspect(given, world_size=1).findings if each.key.startswith("comms_logger")]


def test_a_name_that_is_no_collective_is_an_error_with_the_one_that_was_meant() -> None:
    near, far = findings({"prof_all": False, "prof_ops": ["all_reduse", "sum", "broadcast"]})
    assert (near.severity, near.message) == (
        Severity.ERROR,
        '`comms_logger.prof_ops` has "all_reduse", which is no collective',
    )
    assert near.hint == 'did you mean "all_reduce"?'
    assert far.hint is not None
    assert far.hint.startswith("there are all_gather, all_reduce, all_to_all, barrier, broadcast, receive, ")


def test_names_beside_all_kinds_have_no_effect() -> None:
    (said,) = findings({"prof_ops": ["broadcast"]})
    assert (said.severity, said.message) == (
        Severity.WARNING,
        "`comms_logger.prof_ops` has no effect: `comms_logger.prof_all` counts all kinds",
    )


@pytest.mark.parametrize(
    ("section", "kinds"),
    [
        ({}, None),
        ({"prof_all": False}, frozenset[str]()),
        ({"prof_all": False, "prof_ops": ["all_gather_into_tensor", "recv"]}, {"all_gather", "receive"}),
    ],
)
def test_deepspeeds_names_are_read_as_the_engines(section: dict[str, Any], kinds: frozenset[str] | None) -> None:
    assert findings(section) == []
    config = load({"train_micro_batch_size_per_gpu": 1, "comms_logger": section}, world_size=1)
    assert config.comms_logger.kinds() == kinds
