"""Whether folders that a job writes to take files, and enough of them: rules over values, pure."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.units import format_bytes

from ..storage import Room
from ..verdict import Context, ProbeVerdict

#: Less than this is none.
_LEAST_BYTES = 100 << 20
#: Checkpoints and offloaded states take more than this.
_LITTLE_BYTES = 10 << 30
#: In the working folder, where scripts put their checkpoints unless they are told otherwise; nobody knows how large.
_LITTLE_FOLDER_BYTES = 1 << 30


def room_verdicts(room: Room, *, path: str, context: Context) -> Iterator[ProbeVerdict]:
    """Judges a folder that was named as one that jobs write to.

    Args:
        room: the folder.
        path: name of the folder in a report.
        context: the jobs; those that are sure to write there fail where they cannot.
    """
    bad = "red" if context.writes else "amber"
    free = room.free_bytes
    if room.fault is not None:
        fix = "name another folder, mount it, or change its rights"
        yield ProbeVerdict(level=bad, text=fault_text(room), fix=fix, path=f"{path}.fault")
    elif free is not None and free < _LITTLE_BYTES:
        is_full = free < _LEAST_BYTES
        # Rounded, so that hosts of one shared file system are told together.
        text = f"no space left for {room.path}" if is_full else f"{format_bytes(free)} free for {room.path}"
        fix = "make room there, or write somewhere else"
        yield ProbeVerdict(level=bad if is_full else "amber", text=text, fix=fix, path=f"{path}.free_bytes")


def working_folder_verdicts(
    folder: str, *, free_bytes: int | None, fault: str | None = None, path: str
) -> Iterator[ProbeVerdict]:
    """Judges a working folder, of which nobody knows whether a job writes there.

    Args:
        folder: path of the working folder, absolute.
        free_bytes: bytes that this user may still write there.
        fault: reason why this user can write nothing there, as the end of a sentence; None if it can, or for nobody
            looked.
        path: name of the folder in a report.
    """
    if fault is not None:
        fix = "`cd` to another folder, or write checkpoints elsewhere"
        yield ProbeVerdict(level="amber", text=f"the working folder {folder} {fault}", fix=fix, path=f"{path}.fault")
    elif free_bytes is not None and free_bytes < _LITTLE_FOLDER_BYTES:
        text = f"{format_bytes(free_bytes)} free in the working folder {folder}"
        fix = "make room there if the script saves its checkpoints in it"
        yield ProbeVerdict(level="amber", text=text, fix=fix, path=f"{path}.free_bytes")


def fault_text(room: Room) -> str:
    """Says why nothing can be written to a folder that has a fault, or why it cannot be made."""
    below = "" if room.there == room.path else f", and {room.path} is to be made below it"
    return f"{room.there} {room.fault}{below}"
