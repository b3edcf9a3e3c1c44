"""A refusal tells everything that is wrong, and what only differs apart from it."""

from __future__ import annotations

from dsrun.errors import PreflightError
from dsrun.launcher.preflight.findings import Preflight
from support.host_facts import cluster, judged


def test_a_refusal_carries_every_red_finding_and_the_warnings_stay_apart() -> None:
    odd = {"n2": {"torch": "2.11.0", "shm_total_bytes": None, "nofile": 256, "nofile_hard": 256}}
    found = judged(2, odd, torch="2.13.0")
    preflight = Preflight(seen=cluster(2), findings=tuple(found), meeting=None, seconds=1.0)
    assert preflight.is_red
    error = preflight.error()
    assert isinstance(error, PreflightError)
    assert error.exit_code == 75
    assert error.render().splitlines() == [
        "error: torch: 2.13.0 on n1, 2.11.0 on n2",
        "hint: `pip install torch==2.13.0` on n2",
        "error: /dev/shm: n2: /dev/shm is not there; ranks and data loaders exchange tensors by it",
        "hint: `mount -t tmpfs tmpfs /dev/shm`, or start the container with `--shm-size=8g`",
    ]
    assert preflight.warnings() == [
        "nofile: n2: 256 open files, few for many ranks and data loaders; "
        "`* - nofile 65536` in /etc/security/limits.conf there, or `docker run --ulimit nofile=65536`"
    ]
