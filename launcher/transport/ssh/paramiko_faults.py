"""What paramiko raises while a connection is opened, as one of the faults that people are told. Opens none itself."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dsrun.errors import LaunchError

from ...hosts.spec import HostSpec
from . import faults as ssh_faults
from .proxy import Proxy

if TYPE_CHECKING:
    from paramiko import PKey

#: How paramiko says that a handshake had not ended in time: it goes on without one, and finds that there is none.
_TIMED_OUT = ("No existing session", "Timeout opening channel.")


def explain(
    here: HostSpec, error: Exception, *, timeout_s: float, proxy: Proxy | None, is_at_login: bool
) -> LaunchError | None:
    """Turns what was raised while a connection was opened into words; None for what is a fault of this program.

    Args:
        here: the host or jump that was being opened, at its own address.
        error: exception that was raised while the connection was opened.
        timeout_s: the longest wait for each step.
        proxy: proxy that carries the connection and may be the cause of the fault; None for none.
        is_at_login: whether the server had shown its key, and it was the login that failed.
    """
    import paramiko
    from paramiko.ssh_exception import ConfigParseError, IncompatiblePeer, NoValidConnectionsError

    match error:
        case paramiko.SSHException() | EOFError() | OSError() if proxy is not None and proxy.said.strip():
            return ssh_faults.proxy_failed(here, proxy.command, proxy.said)
        case NoValidConnectionsError():
            if any(isinstance(cause, ConnectionRefusedError) for cause in error.errors.values()):
                return ssh_faults.refused(here)
            return ssh_faults.unreachable(here, " and ".join(str(cause) for cause in error.errors.values()))
        case TimeoutError():
            return ssh_faults.no_answer(here, timeout_s)
        case socket.gaierror():
            return ssh_faults.unknown_name(here)
        case paramiko.BadHostKeyException():
            return ssh_faults.host_key_changed(here, fingerprint=describe_key(error.key))
        case paramiko.BadAuthenticationType():
            return ssh_faults.not_let_in(here, error.allowed_types)
        case paramiko.AuthenticationException():
            locked = isinstance(error, paramiko.PasswordRequiredException)
            return ssh_faults.not_let_in(here, passphrase=locked)
        case paramiko.ChannelException():
            return ssh_faults.unreachable(here, f"its jump host cannot connect to it ({error.text})")
        case IncompatiblePeer():
            return ssh_faults.no_common_cipher(here, str(error))
        case ConfigParseError():
            return LaunchError(
                f"host {here.name}: cannot read ssh_config: {error}",
                hint="correct it, or use the system's client, which knows more of its forms: --transport openssh",
            )
        case paramiko.SSHException() if is_at_login:
            # Of several keys the last complaint is told, which may be about the form of one.
            return ssh_faults.not_let_in(here)
        case paramiko.SSHException() if isinstance(error.__context__, TimeoutError) or str(error) in _TIMED_OUT:
            return ssh_faults.no_answer(here, timeout_s)
        case paramiko.SSHException() | EOFError() | ConnectionError():
            return ssh_faults.dropped(here, str(error) or "end of file")
        case OSError():
            return ssh_faults.unreachable(here, error.strerror or str(error))
        case _:
            return None


def describe_key(key: PKey) -> str:
    """Names a key as `ssh-keygen -l` does."""
    return f"{key.get_name()} {key.fingerprint}"
