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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dsrun.errors import LaunchError

from ...hosts.spec import HostSpec
from . import faults as ssh_faults
from .paramiko_faults import describe_key, explain
from .proxy import Proxy
from .user_config import CONFIGS, not_followed, read_configs

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import MissingHostKeyPolicy, PKey, SSHClient, Transport

#: Where ssh looks unless ssh_config says otherwise.
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
#: More than anybody's, and an end for those that lead in a circle.
_MAX_JUMPS = 16


class LoggedIn:
    """A connection whose server and user are known to each other, and the jumps that carry it."""

    def __init__(self, way: _Way) -> None:
        self._way = way
        transport = _client_of(way.hops[0]).get_transport()
        assert transport is not None, "a connection that was opened has a transport"
        self.transport: Transport = transport

    def close(self) -> None:
        """Ends the connection at once, whatever is under way; may be called twice and from any thread."""
        self._way.close()


@dataclass
class _Way:
    """How a host is reached.

    Attributes:
        hops: a connection to the host and those it goes through, the last hop first.
        proxy: proxy that carries the first hop; None without one, or before it was started.
    """

    hops: list[Connection]
    proxy: Proxy | None = None

    def close(self) -> None:
        for hop in self.hops:
            _client_of(hop).close()
        if self.proxy is not None:
            self.proxy.end()


class SshLogin:
    """Makes connections; may be used from many threads at once.

    Args:
        config: an ssh_config to read in place of the user's and the system's.
        announce: callback that gets one line about each host key that was accepted as new and written to the user's
            known_hosts; None refuses new keys.
    """

    def __init__(self, *, config: Path | None = None, announce: Callable[[str], None] | None = None) -> None:
        self._config_paths = [Path(path).expanduser() for path in CONFIGS] if config is None else [config]
        self._announce = announce
        self._lock = threading.Lock()
        self._config_text: str | None = None

    def connect(self, host: HostSpec, timeout_s: float) -> LoggedIn:
        """Opens the connection, jump by jump.

        Args:
            host: host to connect to.
            timeout_s: longest wait for each step.

        Raises:
            NotYet: there is no way to the host now.
            LaunchError: there is none, or no login.
        """
        way = _Way([])
        here = host
        try:
            way.hops += self._plan(host)
            for hop in reversed(way.hops):
                # A fault is one of this hop, at its own address.
                here = replace(host, addr=hop.host, port=int(str(hop.port)), user=hop.user)
                self._open(hop, here, way, timeout_s)
        except LaunchError:
            way.close()
            raise
        except Exception as error:
            explained = explain(
                here,
                error,
                timeout_s=timeout_s,
                proxy=None if way.proxy is None or _has_met_server(way.hops[-1]) else way.proxy,
                is_at_login=any(_is_at_login(hop) for hop in way.hops),
            )
            way.close()
            if explained is None:
                raise
            raise explained from error
        return LoggedIn(way)

    def _plan(self, host: HostSpec) -> list[Connection]:
        """Returns the connection to the host and those it goes through, the last hop first; none is open."""
        from fabric import Config, Connection
        from paramiko import SSHConfig

        # Lazy: fabric.yml and the like are about another program.
        config = Config(ssh_config=SSHConfig.from_text(self._read_config()), lazy=True)

        def connection(name: str, user: str | None = None, port: int | None = None) -> Connection:
            return Connection(name, user=user, port=port, config=config.clone(), gateway=False, forward_agent=False)

        name = host.name.removeprefix("[").removesuffix("]")
        hops = [connection(name, host.user, host.port)]
        # `Host` sections of ssh_config go by the host's name, wherever it is.
        hops[0].host = host.addr or hops[0].host
        while jumps := _jumps_of(hops[-1]):
            # The first that is named is the first on the way. fabric by itself takes them from the other end.
            hops += [connection(jump) for jump in reversed(jumps)]
            if len(hops) > _MAX_JUMPS:
                raise LaunchError(
                    f"host {host.name}: `ProxyJump` in ssh_config leads over more than {_MAX_JUMPS} hosts",
                    hint="see whether hosts are each other's jumps",
                )
        for hop, gateway in pairwise(hops):
            hop.gateway = gateway
        return hops

    def _read_config(self) -> str:
        with self._lock:
            if self._config_text is None:
                # Of refused and lost connections we tell ourselves; without a handler it would reach stderr, too.
                logging.getLogger("paramiko").addHandler(logging.NullHandler())
                try:
                    self._config_text = read_configs(self._config_paths)
                except OSError as error:
                    paths = " and ".join(map(str, self._config_paths))
                    raise LaunchError(
                        f"cannot read ssh_config ({paths}): {error}", hint="correct it, or see who may read it"
                    ) from error
            return self._config_text

    def _open(self, hop: Connection, here: HostSpec, way: _Way, timeout_s: float) -> None:
        settings = _settings_of(hop)
        if asked := not_followed(settings):
            raise ssh_faults.config_not_followed(here, asked)
        client = _client_of(hop)
        files = _paths(settings.get("userknownhostsfile", _USER_KNOWN_HOSTS))
        for path in [*files, *_paths(settings.get("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))]:
            if path.exists():
                client.load_system_host_keys(str(path))
        client.set_missing_host_key_policy(self._policy(here, files[0] if files else None))
        identities = [path for entry in settings.get("identityfile", []) for path in _paths(entry) if path.exists()]
        hop.connect_timeout = math.ceil(timeout_s)
        hop.connect_kwargs = {
            "banner_timeout": timeout_s,
            "auth_timeout": timeout_s,
            "channel_timeout": timeout_s,
            # As ssh does it: keys that are named are used instead of the usual ones, or even of the agent's.
            "key_filename": [str(path) for path in identities],
            "look_for_keys": "identityfile" not in settings,
            "allow_agent": settings.get("identitiesonly", "no") != "yes" and settings.get("identityagent") != "none",
            "transport_factory": _silent_transport,
        }
        if hop is way.hops[-1] and (command := self._proxy_command(hop)) is not None:
            way.proxy = Proxy(command)
            hop.connect_kwargs["sock"] = way.proxy.socket
        hop.open()

    def _proxy_command(self, hop: Connection) -> str | None:
        """Returns the `ProxyCommand`, where the hostfile's address, port and user are what its `%h %p %r` stand for."""
        from paramiko import SSHConfig

        settings = _settings_of(hop)
        if "proxyjump" in settings or not settings.get("proxycommand"):
            return None
        known = f"Host *\n  HostName {hop.host}\n  Port {hop.port}\n  User {hop.user}\n"
        config = SSHConfig.from_text(known + self._read_config())
        return config.lookup(str(hop.original_host)).get("proxycommand")

    def _policy(self, here: HostSpec, known_hosts: Path | None) -> MissingHostKeyPolicy:
        """What becomes of a host whose key nobody knows: refuse it, or write the key down and say so."""
        from paramiko import MissingHostKeyPolicy

        def judge(hostname: str, key: PKey) -> None:
            if self._announce is None or known_hosts is None:
                raise ssh_faults.host_key_unknown(here, fingerprint=describe_key(key))
            with self._lock:
                known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(known_hosts, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")
            self._announce(f"host {here.name}: accepted its new host key ({describe_key(key)}), now in {known_hosts}")

        class NewHostKey(MissingHostKeyPolicy):
            """Is asked before anything is sent."""

            def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
                judge(hostname, key)

        return NewHostKey()


def _silent_transport(sock: Any, **options: Any) -> Transport:
    """Makes a transport that does not ask on the terminal for a second factor, as paramiko's own would."""
    from paramiko import AuthenticationException, Transport

    class Silent(Transport):
        def auth_interactive_dumb(self, *_: object, **__: object) -> list[str]:
            raise AuthenticationException("the server wants a second factor")

    if isinstance(sock, socket.socket) and sock.family in (socket.AF_INET, socket.AF_INET6):
        # Each of its many small packets would wait for the answer to the one before, up to 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Silent(sock, **options)


def _jumps_of(hop: Connection) -> list[str]:
    """Returns the hosts that the hop is to be reached through, the first on the way first."""
    jumps = str(_settings_of(hop).get("proxyjump") or "none").split(",")
    # `Host *` may name a jump for all hosts, and so for itself.
    is_own = any(hop.derive_shorthand(jump)["host"] in (hop.host, hop.original_host) for jump in jumps)
    return [] if jumps == ["none"] or is_own else [jump.strip() for jump in jumps]


def _has_met_server(hop: Connection) -> bool:
    """Whether the server has shown its key."""
    transport = _client_of(hop).get_transport()
    return transport is not None and transport.host_key is not None


def _is_at_login(hop: Connection) -> bool:
    """Whether the hop has got as far as the server's key and no further, so that it was the login that failed."""
    transport = _client_of(hop).get_transport()
    return transport is not None and transport.host_key is not None and not transport.is_authenticated()


def _paths(value: str) -> list[Path]:
    return [Path(word).expanduser() for word in value.split() if word != "none"]


def _client_of(hop: Connection) -> SSHClient:
    return cast("SSHClient", hop.client)


def _settings_of(hop: Connection) -> dict[str, Any]:
    """What ssh_config says for it, by keyword in lower case."""
    return cast("dict[str, Any]", hop.ssh_config)
