"""Fault matrix, part A: output that is too much, too long, or no text. See test_faults_process.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from support.faults import HARD_LIMIT_S, READY, Gate, launched
from support.traces import peak_memory_of

pytestmark = pytest.mark.timeout(HARD_LIMIT_S + 30)

#: The front end, while 200 MB pass through it.
FRONT_END_BYTES = 150 << 20
AGENT_BYTES = 80 << 20

#: Rank 0 writes 200 MB in lines, then what is awkward, and then the end without an end of line, once it is let on.
#: Words: the gate, and where to leave the digest of all that was written.
FLOOD = f"""{READY}
import hashlib
written = hashlib.sha256(f"ready {{os.getpid()}}\\n".encode())
def write(data):
    written.update(data)
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
if os.environ["RANK"] == "0":
    lines = b"".join(b"%07d %s\\n" % (n, b"x" * 991) for n in range(1_000))
    for _ in range(200):
        write(lines)
    write(b"long " + b"y" * 1_000_000 + b" end of long\\n")
    write(b"nul \\0 bad \\xff\\xc3 end of bad\\n")
    write(b"ready for the last word\\n")
open(sys.argv[1], "rb", 0).read(1)
if os.environ["RANK"] == "0":
    write(b"no end of line")
    open(sys.argv[2], "w").write(written.hexdigest())
"""


def test_A26_200_megabytes_awkward_bytes_and_an_unfinished_line_arrive_whole_in_bounded_memory(
    tmp_path: Path, gate: Gate
) -> None:
    digest = tmp_path / "digest"
    args = ("-n", "2", "--start", "exec")
    with launched(tmp_path, FLOOD, *args, words=[gate.path, str(digest)], keep=100) as job:
        job.wait_for(r"^\[0\] ready for the last word", "stdout")
        peaks = [peak_memory_of(pid) for pid in (job.process.pid, job.agent() or 0)]
        gate.let_through(2)
        ended = job.end()
    assert ended.exit_code == 0
    assert hashlib.sha256((job.folder / "rank0.log").read_bytes()).hexdigest() == digest.read_text()
    assert peaks[0] < FRONT_END_BYTES
    assert peaks[1] < AGENT_BYTES
    own = [line for line in ended.out if line.startswith("[0] ")]
    assert sum(line.endswith("x" * 50) for line in own) == 200_000
    assert own[-1] == "[0] no end of line"
    assert "[0] nul \0 bad \udcff\udcc3 end of bad" in own
    assert all(line.startswith(("[0] ", "[1] ")) for line in ended.out)
