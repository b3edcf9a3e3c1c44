"""Who reaches the port where the ranks of two hosts meet, and is none of the job, is told; nobody of the job is."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from support.many_hosts import hostfile, started_on_hosts
from support.namespaces import hosts, why_no_hosts

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

#: Joins, says where, and goes on once the test has put a file down.
JOIN = """
import os, pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
    while not pathlib.Path("go-on").exists():
        time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_third_address_at_the_store_is_told_and_no_host_of_the_job_is(tmp_path: Path) -> None:
    with hosts(2, tmp_path) as rig:
        (tmp_path / "join.py").write_text(JOIN)
        logs = tmp_path / "logs"
        words = ["--no-gpu", "--log-dir", str(logs), "join.py"]
        with started_on_hosts(rig, *words, cwd=tmp_path, hosts=hostfile(rig, slots=2)) as job:
            assert job.stdout is not None
            assert job.stderr is not None
            label, address, port = job.stdout.readline().decode().split()
            assert label == "[n1:0]"
            told: list[str] = []
            # This machine is on the hosts' network, and none of the job's hosts.
            with socket.create_connection((address, int(port))):
                while not told:
                    line = job.stderr.readline().decode()
                    assert line, "the job ended without a word of the stranger"
                    told += [line] if "where the ranks meet" in line else []
            (tmp_path / "go-on").touch()
            _, said = job.communicate(timeout=60)
            assert job.returncode == 0, said.decode()
            told += [line for line in said.decode().splitlines() if "where the ranks meet" in line]
        assert len(told) == 1, told
        assert f"a connection from {rig.front.address}:" in told[0]
        assert f" to {address}:{port}, where the ranks meet, is from no host of this job" in told[0]
        (events,) = logs.glob("*/events.jsonl")
        notes = [event["text"] for line in events.read_text().splitlines() if "text" in (event := json.loads(line))]
        assert [note for note in notes if "where the ranks meet" in note] != []
