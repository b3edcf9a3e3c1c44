"""What this process has resident, by kind: read from /proc, and the most of it while it ran."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_KIB = 1024
_PERIOD_S = 0.004


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes: of its own, of files (libraries), and of memory that is shared between processes."""

    own: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        """All of it; the kernel's RSS."""
        return self.own + self.files + self.shared


def resident() -> Resident:
    """Returns what is resident now."""
    kib = _fields("/proc/self/status")
    return Resident(*(kib[name] * _KIB for name in ("RssAnon", "RssFile", "RssShmem")))


class Sampler:
    """Notes the most that is resident, in a thread of its own; `reset` begins anew."""

    def __init__(self) -> None:
        self._most = resident()
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self) -> dict[str, float]:
        """Returns bytes: the parts at the highest sample, and the kernel's own exact mark of the whole process."""
        most = self._most
        proportional = _fields("/proc/self/smaps_rollup")
        return {
            **asdict(most),
            "sampled": most.total,
            "peak": _fields("/proc/self/status")["VmHWM"] * _KIB,
            # Pages of other ranks' memory that this one has mapped, and would count as well: at most by a page's share.
            "counted_twice": resident().shared - proportional["Pss_Shmem"] * _KIB,
        }

    def reset(self) -> None:
        """Forgets what was before; proc(5), clear_refs."""
        Path("/proc/self/clear_refs").write_text("5")
        self._most = resident()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_PERIOD_S):
            seen = resident()
            if seen.total > self._most.total:
                self._most = seen


def _fields(path: str) -> dict[str, int]:
    """Returns the lines `name: number kB` of a file of /proc."""
    found: dict[str, int] = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0])
    return found
