"""Whether folders and drives serve a job: rules over a report, pure. How much room there is, is judged in room."""

from __future__ import annotations

from collections.abc import Iterator

from ..report import ProbeReport
from ..verdict import Context, ProbeVerdict
from .room import room_verdicts, working_folder_verdicts

_FEW_INODES = 10_000


def storage_verdicts(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Judges the folders of a report, and its NVMe drives."""
    for number, place in enumerate(report.storage.paths):
        path, asked = f"storage.paths.{number}", place.path != report.disk.path
        if place.answers is False:
            text = f"{place.path} does not answer ({place.filesystem} from {place.source}): jobs that touch it hang"
            fix = "is its server up? `umount -f -l` it if not"
            yield ProbeVerdict(level="red", text=text, fix=fix, path=f"{path}.answers")
            continue
        if asked:
            yield from room_verdicts(place, path=path, context=Context())
        else:
            yield from working_folder_verdicts(place.path, free_bytes=place.free_bytes, fault=place.fault, path=path)
        if place.network:
            text = f"{place.path} is on a network file system ({place.filesystem})"
            text += ": offload there is slow" if asked else ": checkpoints and imports go over the network"
            fix = "use a local drive" if asked else "keep the environment and offload on a local drive"
            yield ProbeVerdict(level="amber" if asked else "note", text=text, fix=fix, path=f"{path}.network")
        if place.direct_io is False and asked:
            text = f"{place.path} knows no O_DIRECT ({place.filesystem}): offload there fills the page cache"
            yield ProbeVerdict(
                level="amber", text=text, fix="use ext4 or XFS on a local drive", path=f"{path}.direct_io"
            )
        if place.free_inodes is not None and place.free_inodes < _FEW_INODES:
            text = f"{place.path}: {place.free_inodes} more files can be made"
            yield ProbeVerdict(level="amber", text=text, fix="remove files there", path=f"{path}.free_inodes")
    for number, drive in enumerate(report.storage.nvme):
        link = drive.pcie
        if link.width is not None and link.width_max is not None and link.width < link.width_max:
            text = f"{drive.name} PCIe gen{link.generation} x{link.width} of gen{link.generation_max} x{link.width_max}"
            fix = "reseat the drive; look up how many lanes its slot has"
            yield ProbeVerdict(level="amber", text=text, fix=fix, path=f"storage.nvme.{number}.pcie.width")
