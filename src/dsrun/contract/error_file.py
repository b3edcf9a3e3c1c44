"""The error file: why a worker failed, in the form that torch elastic gives it. Knows no path, see `JobPaths`.

A worker writes it when nothing can catch its error any more, and its launcher reads it once the worker has ended.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files.atomic import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """Why a worker ended, as it said itself.

    Attributes:
        message: one line: the exception's type and text, or the rendered `error:` and `hint:` lines.
        traceback: the Python traceback; empty for a `DsrunError`, which needs none.
        time_s: seconds since the epoch, by the worker's clock.
        pid: the process that ends of it; None where the file was left by another than `write_error_file`.
        exit_code: exit code of the process if nothing stops it on its way out; None where the code is not given.
    """

    message: str
    traceback: str
    time_s: float
    pid: int | None = None
    exit_code: int | None = None

    @property
    def is_rendered(self) -> bool:
        """Whether the message is the `error:` and `hint:` lines of a `DsrunError`, to be shown as they are."""
        return not self.traceback and self.message.startswith("error: ")


def write_error_file(path: Path, error: BaseException, *, exit_code: int | None = None) -> bool:
    """Writes torch elastic's error file format, so other launchers can read it too; and signs it with the process's id.

    Args:
        path: path of the error file that the launcher asked for; an existing file keeps its error, which is the cause,
            and is only signed.
        error: the exception that ends this process, to be called only when nothing can catch it any more.
        exit_code: exit code with which the process will end; None for the code of a `DsrunError`, and Python's 1 for
            any other error.

    Returns:
        whether it was written.

    Raises:
        OSError: the folder is missing, read-only or full.
    """
    if path.exists():
        _sign(path)
        return False
    expected = isinstance(error, DsrunError)
    message = error.render() if isinstance(error, DsrunError) else _summary(error)
    stack = "" if expected else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if exit_code is None:
        exit_code = error.exit_code if isinstance(error, DsrunError) else 1
    extra = {"py_callstack": stack, "timestamp": repr(time.time()), "pid": os.getpid(), "exit_code": exit_code}
    write_atomic(path, json.dumps({"message": {"message": message, "extraInfo": extra}}).encode(), mode=0o600)
    return True


def _sign(path: Path) -> None:
    """Says in a word that torch's `@record` has left that this process ends of it; anything else is left as it is."""
    try:
        body: Any = json.loads(path.read_bytes())
        body["message"]["extraInfo"]["pid"] = os.getpid()
    except (ValueError, KeyError, TypeError):
        return
    written = path.stat()
    write_atomic(path, json.dumps(body).encode(), mode=0o600)
    # It may be the only exact time there is, see `read_error_file`.
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))


def _summary(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        # A user's class may fail at that; plain python says so in the same words.
        text = "<exception str() failed>"
    return f"{name}: {text}" if text else name


def read_error_file(path: Path) -> WorkerError | None:
    """Reads an error file; None where there is none or it is no error file."""
    try:
        body: Any = json.loads(path.read_bytes())
        message: Any = body["message"]
        if isinstance(message, str):
            return WorkerError(message=message, traceback="", time_s=path.stat().st_mtime)
        extra: Any = message.get("extraInfo", {})
        written_s = path.stat().st_mtime
        stated_s = float(extra.get("timestamp", written_s))
        return WorkerError(
            message=str(message["message"]),
            traceback=str(extra.get("py_callstack", "")),
            # torch states whole seconds, in which the first failure cannot be told from those that it caused.
            time_s=written_s if stated_s.is_integer() else stated_s,
            pid=int(extra["pid"]) if "pid" in extra else None,
            exit_code=int(extra["exit_code"]) if "exit_code" in extra else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
