"""Logs in to one host with fabric: its ssh_config with jumps, its known host keys, its keys. Starts no command.

Fabric by itself accepts any host key, also a changed one; here every hop is checked against known_hosts before it is
sent anything, and what is not known is refused. Nothing is ever asked: no password, no passphrase, no second factor.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dsrun.errors import LaunchError

from ..hosts import HostSpec
from . import ssh_faults

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import MissingHostKeyPolicy, PKey, SSHClient, SSHConfig, Transport

#: Where ssh looks unless ssh_config says otherwise.
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")


class LoggedIn:
    """A connection whose server and user are known to each other, and the jumps that carry it."""

    def __init__(self, hops: list[Connection]) -> None:
        self._hops = hops
        transport = _client_of(hops[0]).get_transport()
        assert transport is not None, "a connection that was opened has a transport"
        self.transport: Transport = transport

    def close(self) -> None:
        """Ends the connection at once, whatever is under way; may be called twice and from any thread."""
        _close(self._hops)


class SshLogin:
    """Makes connections; may be used from many threads at once.

    Args:
        connect_timeout_s: longest wait for each step of a connection.
        config: an ssh_config to read in place of the user's and the system's.
        announce: told, as one line, of each host key that was accepted as new and written to the user's known_hosts;
            None refuses them.
    """

    def __init__(
        self, *, connect_timeout_s: float, config: Path | None = None, announce: Callable[[str], None] | None = None
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._config_paths = [Path(path).expanduser() for path in _CONFIGS] if config is None else [config]
        self._announce = announce
        self._lock = threading.Lock()
        self._config: SSHConfig | None = None

    def connect(self, host: HostSpec) -> LoggedIn:
        """Opens the connection, jump by jump.

        Raises:
            LaunchError: there is no way to the host, or no login.
        """
        hops: list[Connection] = []
        here = host
        try:
            hops = self._plan(host)
            for hop in reversed(hops):
                # A fault is one of this hop, at its own address.
                here = replace(host, addr=hop.host, port=int(str(hop.port)), user=hop.user)
                self._open(hop, here)
        except LaunchError:
            _close(hops)
            raise
        except Exception as error:
            explained = self._explain(here, error, hops)
            _close(hops)
            if explained is None:
                raise
            raise explained from error
        return LoggedIn(hops)

    def _plan(self, host: HostSpec) -> list[Connection]:
        """Returns the connection to the host and those it goes through, the last hop first; none is open."""
        from fabric import Config, Connection

        # Lazy: fabric.yml and the like are about another program.
        config = Config(ssh_config=self._read_config(), lazy=True)
        name = host.name.removeprefix("[").removesuffix("]")
        timeout_s = math.ceil(self._connect_timeout_s)
        target = Connection(
            name, user=host.user, port=host.port, config=config, connect_timeout=timeout_s, forward_agent=False
        )
        # `Host` sections of ssh_config go by the host's name, wherever it is.
        target.host = host.addr or target.host
        hops = [target]
        while isinstance(hops[-1].gateway, Connection):
            hops.append(hops[-1].gateway)
        for hop in hops:
            hop.connect_timeout = timeout_s
        return hops

    def _read_config(self) -> SSHConfig:
        from paramiko import SSHConfig

        with self._lock:
            if self._config is None:
                # Of refused and lost connections we tell ourselves; without a handler it would reach stderr, too.
                logging.getLogger("paramiko").addHandler(logging.NullHandler())
                config = SSHConfig()
                for path in self._config_paths:
                    if path.exists():
                        with path.open() as file:
                            config.parse(file)
                self._config = config
            return self._config

    def _open(self, hop: Connection, here: HostSpec) -> None:
        settings = cast("dict[str, Any]", hop.ssh_config)
        client = _client_of(hop)
        files = _paths(settings.get("userknownhostsfile", _USER_KNOWN_HOSTS))
        for path in [*files, *_paths(settings.get("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))]:
            if path.exists():
                client.load_system_host_keys(str(path))
        client.set_missing_host_key_policy(self._policy(here, files[0] if files else None))
        identities = [path for entry in settings.get("identityfile", []) for path in _paths(entry) if path.exists()]
        timeout_s = self._connect_timeout_s
        hop.connect_kwargs = {
            "banner_timeout": timeout_s,
            "auth_timeout": timeout_s,
            "channel_timeout": timeout_s,
            # As ssh does it: keys that are named are used instead of the usual ones, or even of the agent's.
            "key_filename": [str(path) for path in identities],
            "look_for_keys": "identityfile" not in settings,
            "allow_agent": settings.get("identitiesonly", "no") != "yes",
            "transport_factory": _silent_transport,
        }
        hop.open()

    def _policy(self, here: HostSpec, known_hosts: Path | None) -> MissingHostKeyPolicy:
        """What becomes of a host whose key nobody knows: refuse it, or write the key down and say so."""
        from paramiko import MissingHostKeyPolicy

        def judge(hostname: str, key: PKey) -> None:
            if self._announce is None or known_hosts is None:
                raise ssh_faults.host_key_unknown(here, fingerprint=_describe(key))
            with self._lock:
                known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(known_hosts, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")
            self._announce(f"host {here.name}: accepted its new host key ({_describe(key)}), now in {known_hosts}")

        class NewHostKey(MissingHostKeyPolicy):
            """Is asked before anything is sent."""

            def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
                judge(hostname, key)

        return NewHostKey()

    def _explain(self, here: HostSpec, error: Exception, hops: list[Connection]) -> LaunchError | None:
        """Turns what paramiko raised into words; None for what is a fault of this program."""
        import paramiko
        from paramiko.ssh_exception import ConfigParseError, NoValidConnectionsError

        timeout_s = self._connect_timeout_s
        match error:
            case NoValidConnectionsError():
                if any(isinstance(cause, ConnectionRefusedError) for cause in error.errors.values()):
                    return ssh_faults.refused(here)
                return ssh_faults.unreachable(here, " and ".join(str(cause) for cause in error.errors.values()))
            case TimeoutError():
                return ssh_faults.no_answer(here, timeout_s)
            case socket.gaierror():
                return ssh_faults.unknown_name(here)
            case paramiko.BadHostKeyException():
                return ssh_faults.host_key_changed(here, fingerprint=_describe(error.key))
            case paramiko.BadAuthenticationType():
                return ssh_faults.not_let_in(here, error.allowed_types)
            case paramiko.AuthenticationException():
                locked = isinstance(error, paramiko.PasswordRequiredException)
                return ssh_faults.not_let_in(here, passphrase=locked)
            case paramiko.ChannelException():
                return ssh_faults.unreachable(here, f"its jump host cannot connect to it ({error.text})")
            case ConfigParseError():
                return LaunchError(
                    f"host {here.name}: cannot read ssh_config: {error}",
                    hint="correct it, or use the system's client, which knows more of its forms: --transport openssh",
                )
            case paramiko.SSHException() if any(_has_met_server(hop) for hop in hops):
                # Of several keys the last complaint is told, which may be about the form of one.
                return ssh_faults.not_let_in(here)
            case paramiko.SSHException() if "Timeout" in str(error) or "timed out" in str(error.__cause__):
                return ssh_faults.no_answer(here, timeout_s)
            case paramiko.SSHException() | EOFError() | ConnectionError():
                return ssh_faults.closed_early(here, str(error) or "end of file")
            case OSError():
                return ssh_faults.unreachable(here, error.strerror or str(error))
            case _:
                return None


def _silent_transport(sock: socket.socket, **options: Any) -> Transport:
    """Makes a transport that does not ask on the terminal for a second factor, as paramiko's own would."""
    from paramiko import AuthenticationException, Transport

    class Silent(Transport):
        def auth_interactive_dumb(self, *_: object, **__: object) -> list[str]:
            raise AuthenticationException("the server wants a second factor")

    return Silent(sock, **options)


def _has_met_server(hop: Connection) -> bool:
    """Whether the last hop that was tried has got as far as its host key, so that it was the login that failed."""
    transport = _client_of(hop).get_transport()
    return transport is not None and transport.host_key is not None and not transport.is_authenticated()


def _paths(value: str) -> list[Path]:
    return [Path(word).expanduser() for word in value.split() if word != "none"]


def _describe(key: PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def _close(hops: list[Connection]) -> None:
    for hop in hops:
        _client_of(hop).close()


def _client_of(hop: Connection) -> SSHClient:
    return cast("SSHClient", hop.client)
