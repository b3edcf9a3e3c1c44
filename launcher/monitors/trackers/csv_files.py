"""CSV files, one for each name, with DeepSpeed's layout: `<output_path>/<job_name>/Train_Samples_lr.csv`.

A row is `samples,value`, in order of samples, each once. Rows that do not count any more are cut off, so that the files
of a run that was killed and went on are those of a run that was not.

[Note: whose files] The folder may hold tables of the user, and may be the working folder itself. A file is taken for a
scalar's only if its header is `step` and the last word of a name, and its own name ends in that word.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..points import Point
from .run_folder import RunFolder
from .tracker import TrackedRun, Tracker

_ENDING = ".csv"
#: Longest name of a file without its ending: a file system takes 255 bytes, of which some are left for numbers.
_LONGEST = 200
#: Folder below the run's for the files of a run that another began anew in the same place.
_EARLIER = "earlier-"
#: Behind the names of files that are cut short, or would be those of another scalar.
_DIGEST = re.compile(r"-[0-9a-f]{8}$")


def open_tracker(run: TrackedRun) -> Tracker:
    """Opens the folder of the files, which is made if need be.

    Args:
        run: The run.

    Raises:
        OSError: the folder cannot be made.
        TrackerProblem: another job writes there.
    """
    folder = RunFolder(run, tracker="csv_monitor")
    return CsvFiles(folder, kept=run.kept, is_new=run.samples is None)


class CsvFiles:
    """The files of one run.

    Args:
        folder: Their folder.
        kept: Values that are found again: `files` are the names of scalars by those of their files, and `has_begun`
            says that files of an earlier run were moved, also where the rows behind that could not be written.
        is_new: Whether the run has written nothing so far: what is there is another's.
    """

    def __init__(self, folder: RunFolder, *, kept: dict[str, Any], is_new: bool) -> None:
        self._held = folder
        self._folder = folder.path
        self._kept = kept
        self._tags: dict[str, str] = kept.setdefault("files", {})
        self._is_new = is_new and not kept.get("has_begun")
        #: Samples of the last row by file.
        self._last: dict[str, int] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Appends a row for each scalar, after cutting off rows that are written again."""
        rows: dict[str, list[tuple[int, float]]] = {}
        for point in points:
            if point.after_samples is not None:
                self._append(rows)
                rows = {}
                self._cut_all(point.after_samples, begins_anew=self._is_new and point.step <= 1)
                self._is_new, self._kept["has_begun"] = False, True
            for tag, value in point.values.items():
                rows.setdefault(self._file_of(tag), []).append((point.samples, value))
        self._append(rows)

    def close(self) -> None:
        """Lets go of the folder; no file is open."""
        self._held.let_go()

    def _append(self, rows: dict[str, list[tuple[int, float]]]) -> None:
        for name, new in rows.items():
            path = self._folder / name
            kept: list[tuple[int, float]] = []
            for samples, value in new:
                # A value of the same samples takes the place of the one before.
                while kept and kept[-1][0] >= samples:
                    kept.pop()
                kept.append((samples, value))
            if name not in self._last or self._last[name] >= kept[0][0]:
                self._last[name] = _cut(path, kept[0][0] - 1)
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            if not path.exists() or path.stat().st_size == 0:
                writer.writerow(["step", " ".join(self._tags[name].rpartition("/")[2].splitlines())])
            writer.writerows(kept)
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
            self._last[name] = kept[-1][0]

    def _cut_all(self, after_samples: int, *, begins_anew: bool) -> None:
        files = [
            path
            for path in sorted(self._folder.glob(f"*{_ENDING}"))
            if path.name in self._tags or _is_of_a_scalar(path)
        ]
        if begins_anew and files:
            numbers = (path.name.removeprefix(_EARLIER) for path in self._folder.glob(f"{_EARLIER}*"))
            number = max((int(text) for text in numbers if text.isdecimal()), default=0) + 1
            earlier = self._folder / f"{_EARLIER}{number}"
            earlier.mkdir()
            for path in files:
                path.rename(earlier / path.name)
            return
        for path in files:
            self._last[path.name] = _cut(path, after_samples)

    def _file_of(self, tag: str) -> str:
        """Returns the name of a scalar's file, as DeepSpeed makes it; two scalars never share one."""
        plain = _plain(tag)
        digest = hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        if len(os.fsencode(plain)) > _LONGEST:
            plain = f"{os.fsencode(plain)[:_LONGEST].decode('utf-8', 'ignore')}-{digest}"
        name = f"{plain}{_ENDING}"
        if self._tags.setdefault(name, tag) != tag:
            name = f"{plain}-{digest}{_ENDING}"
            self._tags[name] = tag
        return name


def _plain(tag: str) -> str:
    return "_".join(re.split(r"[/ \0]", "_".join(tag.splitlines())))


def _is_of_a_scalar(path: Path) -> bool:
    """Whether a file that was there before is a scalar's, see [Note: whose files]."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        header = next(csv.reader([file.readline(1 << 16)]), [])
    if len(header) != 2 or header[0] != "step":
        return False
    stem = path.name.removesuffix(_ENDING)
    name = _DIGEST.sub("", stem)
    return name.endswith(_plain(header[1])) or (name != stem and len(os.fsencode(stem)) > _LONGEST)


def _cut(path: Path, after_samples: int) -> int:
    """Cuts a file behind its last whole row of at most so many samples; returns the samples of that row, -1 for none.

    A row that was torn, by a kill or a full disk, goes too.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return -1
    end, last = 0, -1
    for number, line in enumerate(data.splitlines(keepends=True)):
        first = line.partition(b",")[0]
        is_row = first.isdigit() and int(first) <= after_samples
        if not line.endswith(b"\n") or not (is_row or number == 0 or first == b"step"):
            break
        end += len(line)
        last = int(first) if is_row else last
    if end < len(data):
        os.truncate(path, end)
    return last
