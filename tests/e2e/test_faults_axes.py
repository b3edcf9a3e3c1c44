"""Fault matrix, part A, where three axes divide the ranks: one that stalls, dies or raises is told with its place on
each of them, with what it did, and with who waits for it in what. The others wait in chains, and none is blamed.

See test_faults_process.py. What one stage of a pipeline is told to wait for stands in test_faults_pipeline.py; every
place, fault and rank in turn: scripts/soak --axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.axis_faults import Fault
from support.faults import HARD_LIMIT_S

pytestmark = [
    pytest.mark.timeout(HARD_LIMIT_S + 30),
    pytest.mark.depends_on_speed("a hang time-out of a few seconds, and a bound on the end of all ranks"),
]

#: What ranks of the other data part wait in, which have done all but add up with the first one.
_SUM = "reduce_scatter of unit "
_OUTPUTS = "all_reduce sum of outputs of a cut layer"
_INPUT_GRADS = "all_reduce sum of gradient of a cut layer's input"
_ACTIVATIONS = "receive of activations of micro batch 0 for chunk 1 from ranks "
_GRADIENTS = "receive of gradients of micro batch 0 for chunk 0 from ranks "

#: Each fault, each place, and a rank of each axis that has the number 1 there.
FAULTS = [
    (
        Fault("never returns", "optimizer", 2),
        ("rank 0 (pipe 0, data 0, tensor 0)", "all_gather of unit "),
        ("ranks 1, 3 (pipe 0, tensor 1)", "all_gather of unit "),
        ("4 ranks (pipe 1)", "all_reduce max of items of a global batch"),
    ),
    (
        Fault("SIGSTOP", "backward", 4),
        ("rank 5 (pipe 1, data 0, tensor 1)", _INPUT_GRADS),
        ("ranks 0, 1 (pipe 0, data 0)", f"{_GRADIENTS}4, 5 (pipe 1, data 0)"),
        ("ranks 2, 3 (pipe 0, data 1)", _SUM),
        ("ranks 6, 7 (pipe 1, data 1)", _SUM),
    ),
    (Fault("SIGKILL", "save", 2), ("7 ranks", "all_reduce max of save its part outcome")),
    (
        Fault("raises", "forward", 1),
        ("rank 0 (pipe 0, data 0, tensor 0)", _OUTPUTS),
        ("ranks 2, 3 (pipe 0, data 1)", _SUM),
    ),
]
#: Further ones: what stands for them by default.
MORE_FAULTS = {
    "the same place, where the rank raises, and another one that never returns": (
        Fault("never returns", "forward", 1),
        ("rank 0 (pipe 0, data 0, tensor 0)", _OUTPUTS),
        ("ranks 4, 5 (pipe 1, data 0)", f"{_ACTIVATIONS}0, 1 (pipe 0, data 0)"),
        ("ranks 2, 3 (pipe 0, data 1)", _SUM),
        ("ranks 6, 7 (pipe 1, data 1)", _SUM),
    ),
    "another place of SIGKILL, and another fault in backward": (
        Fault("SIGKILL", "backward", 1),
        ("rank 0 (pipe 0, data 0, tensor 0)", _INPUT_GRADS),
        ("ranks 2, 3 (pipe 0, data 1)", _SUM),
    ),
    "another place of SIGKILL, and another fault in forward": (
        Fault("SIGKILL", "forward", 6),
        ("rank 7 (pipe 1, data 1, tensor 1)", _OUTPUTS),
        ("ranks 2, 3 (pipe 0, data 1)", f"{_GRADIENTS}6, 7 (pipe 1, data 1)"),
    ),
    "another rank that raises there": (
        Fault("raises", "forward", 4),
        ("rank 5 (pipe 1, data 0, tensor 1)", _OUTPUTS),
        ("ranks 0, 1 (pipe 0, data 0)", f"{_GRADIENTS}4, 5 (pipe 1, data 0)"),
    ),
}


def _id(fault: Fault) -> str:
    return f"rank {fault.rank} {fault.how} {fault.place}".replace(" ", "-")


@pytest.mark.parametrize(
    ("fault", "waits"),
    [
        *(pytest.param(fault, waits, id=_id(fault)) for fault, *waits in FAULTS),
        *(
            pytest.param(fault, waits, id=_id(fault), marks=pytest.mark.soak(instead))
            for instead, (fault, *waits) in MORE_FAULTS.items()
        ),
    ],
)
def test_A2_A4_a_rank_is_told_with_its_place_on_each_axis_its_action_and_who_waits_for_it(
    tmp_path: Path, fault: Fault, waits: Sequence[tuple[str, str]]
) -> None:
    ended = fault.run(tmp_path)
    if fault.how in ("never returns", "SIGSTOP"):
        said, verb = ended.errors[0], "wait"
    else:
        (said,) = [line for line in ended.err if " waited in " in line]
        verb = "waited"
    for ranks, wait in waits:
        waiting = f"{ranks} {verb}s in" if verb == "wait" and ranks.startswith("rank ") else f"{ranks} {verb} in"
        assert f"{waiting} {wait}" in said, ended.text
