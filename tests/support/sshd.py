"""A real sshd for tests, with its own host key and configuration, started in a namespace or wherever a prefix leads."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

#: Keys only, and none of the machine's own settings. Options of a test come first, and the first value counts.
_OPTIONS = {
    "PermitRootLogin": "yes",
    "PubkeyAuthentication": "yes",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    # Folders of tests may be open to others.
    "StrictModes": "no",
    "PidFile": "none",
    "MaxStartups": "200",
    "Subsystem": "sftp internal-sftp",
}
_START_PATIENCE_S = 20.0


def find_sshd() -> str | None:
    """The server's path, which sshd wants to be absolute; None where it is not installed."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def make_key(path: Path, *, passphrase: str = "") -> str:
    """Makes a pair of keys; returns the public one as `type base64`."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


class Sshd:
    """A server that listens on its port from `start` to `stop`.

    Args:
        folder: folder for the server's files; it must exist.
        authorized_keys: file of the keys that may log in.
        prefix: words before the command, which take it to where it is to run.
        port: port to listen on, on all addresses.
    """

    def __init__(self, folder: Path, authorized_keys: Path, *, prefix: Sequence[str] = (), port: int = 22) -> None:
        self.port = port
        self._folder = folder
        self._authorized_keys = authorized_keys
        self._prefix = list(prefix)
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None
        self.public_key = self.change_host_key()

    def change_host_key(self) -> str:
        """Makes a new host key, which the next start uses; returns its public half."""
        path = self._folder / "host_key"
        for old in (path, path.with_suffix(".pub")):
            old.unlink(missing_ok=True)
        self.public_key = make_key(path)
        return self.public_key

    def start(self, options: Mapping[str, str] | None = None) -> None:
        """Starts the server and waits until it listens.

        Args:
            options: lines of sshd_config that overrule the usual ones.
        """
        program = find_sshd()
        assert program is not None, "sshd is installed"
        own = {"Port": str(self.port), "HostKey": str(self._folder / "host_key")}
        config = self._folder / "sshd_config"
        settings = {**own, "AuthorizedKeysFile": str(self._authorized_keys), **_OPTIONS, **(options or {})}
        config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self._process = subprocess.Popen(
            [*self._prefix, program, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._lines.clear()
        listening = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, listening), daemon=True)
        self._reader.start()
        assert listening.wait(_START_PATIENCE_S), f"sshd does not start: {self._lines}"
        assert self._process.poll() is None, f"sshd ended at once: {self._lines}"

    @property
    def log(self) -> str:
        """What the server has said since it was started."""
        return "\n".join(self._lines)

    def stop(self) -> None:
        """Kills the listening server; connections that stand live on. May be called twice."""
        if self._process is None or self._process.poll() is not None:
            return
        for process in self._listeners():
            process.kill()
        self._process.wait(_START_PATIENCE_S)
        self._process = None

    def cut(self) -> int:
        """Kills the servers of the connections that stand, and not the commands that they started.

        Returns:
            how many were killed.
        """
        killed = 0
        for listener in self._listeners():
            for server in listener.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if server.name() == "sshd":
                        server.kill()
                        killed += 1
        return killed

    def _listeners(self) -> list[psutil.Process]:
        assert self._process is not None, "the server runs"
        # Behind a prefix that forks, the server is its child.
        starter = psutil.Process(self._process.pid)
        return starter.children() if self._prefix else [starter]

    def _read(self, process: subprocess.Popen[str], listening: threading.Event) -> None:
        assert process.stderr is not None, "stderr is a pipe"
        with process.stderr as lines:
            for line in lines:
                self._lines.append(line.rstrip())
                if "Server listening on 0.0.0.0" in line:
                    listening.set()
        listening.set()
