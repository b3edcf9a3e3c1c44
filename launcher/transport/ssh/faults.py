"""Why a host cannot be reached over ssh, in words: a message and a way out for each cause. Pure; connects to nothing.

The system's client says it on stderr, in texts that have been the same for many years; what is not known here is
quoted as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dsrun.errors import LaunchError

from ...hosts.spec import HostSpec
from ..base import WAIT_LONGER
from ..login_line import NOT_EXECUTABLE, NOT_FOUND

#: What the client ends with when it, and not the command, has failed.
SSH_FAILED = 255
#: Longest quotation of what a host said.
_QUOTE_CHARS = 300


class NotYet(LaunchError):
    """A fault that may pass by itself: the host is still booting, or its server is overrun."""


def refused(host: HostSpec) -> NotYet:
    """Nothing listens there."""
    return NotYet(
        f"host {host.name}: no ssh server listens at {_place(host)} (connection refused)",
        hint="start sshd there, or say where it listens: `port=` in the hostfile, `Port` in ssh_config",
    )


def no_answer(host: HostSpec, timeout_s: float, *, during: str = "") -> LaunchError:
    """It is silent."""
    return LaunchError(
        f"host {host.name}: no answer from {_place(host)} within {timeout_s:g} s{during}",
        hint="see whether the host is up and a firewall lets ssh through",
    )


def unreachable(host: HostSpec, reason: str) -> NotYet:
    """The network has no way there."""
    return NotYet(
        f"host {host.name}: cannot reach {_place(host)}: {reason}",
        hint="see the host's address (`addr=` in the hostfile) and this machine's routes",
    )


def unknown_name(host: HostSpec) -> LaunchError:
    """No such name."""
    return LaunchError(
        f"host {host.name}: the name {host.address!r} has no address here",
        hint="correct the name, give `addr=` in the hostfile, or name the host in ssh_config or /etc/hosts",
    )


def host_key_unknown(host: HostSpec, *, fingerprint: str = "") -> LaunchError:
    """Nobody has said yet that this key is the host's."""
    key = f" ({fingerprint})" if fingerprint else ""
    return LaunchError(
        f"host {host.name}: its host key{key} is not known here, so that it was sent nothing",
        hint=f"log in once with `{_login(host)}` and compare the key, or pass --accept-new-host-keys",
    )


def host_key_changed(host: HostSpec, *, fingerprint: str = "") -> LaunchError:
    """Somebody else may be answering."""
    key = f" ({fingerprint})" if fingerprint else ""
    return LaunchError(
        f"host {host.name}: its host key{key} is not the one known here: the host was set up anew, or somebody else "
        "answers in its place; it was sent nothing",
        hint=f"if the change is known and right, remove the old key: `ssh-keygen -R {_known_name(host)}`",
    )


def not_let_in(host: HostSpec, accepted: Sequence[str] = (), *, passphrase: bool = False) -> LaunchError:
    """No key that can be used without asking opens the door.

    Args:
        host: the host.
        accepted: ways to log in that the server accepts, `publickey` for example; empty if it did not say.
        passphrase: whether a key could not be used for want of its passphrase.
    """
    user = "" if host.user is None else f" as {host.user}"
    if passphrase:
        return LaunchError(
            f"host {host.name}: cannot log in{user}: the key is locked with a passphrase, for which dsrun never asks",
            hint="unlock it once with `ssh-add`, which keeps it for ssh-agent",
        )
    if accepted and "publickey" not in accepted:
        return LaunchError(
            f"host {host.name}: cannot log in{user}: the server takes {', '.join(accepted)} only, "
            "for which dsrun never asks",
            hint="allow keys there (`PubkeyAuthentication yes` in sshd_config) and give it yours with `ssh-copy-id`",
        )
    takes = f"; it takes {', '.join(accepted)}" if accepted else ""
    return LaunchError(
        f"host {host.name}: cannot log in{user}: the server accepted none of the keys offered{takes}",
        hint=f"`{_login(host)}` must work without a question: give the host your key with `ssh-copy-id`, "
        "unlock a key that has a passphrase with `ssh-add`, or name it in ssh_config (`IdentityFile`)",
    )


def dropped(host: HostSpec, said: str) -> NotYet:
    """The server hung up without a word."""
    return NotYet(
        f"host {host.name}: the server at {_place(host)} closed the connection without a greeting: {_quote(said)}",
        hint="it may be overrun (`MaxStartups` in its sshd_config) or no ssh server at all; its log says why",
    )


def proxy_failed(host: HostSpec, command: str, said: str) -> NotYet:
    """What was to carry the connection ended, or leads nowhere."""
    return NotYet(
        f"host {host.name}: its `ProxyCommand {command}` made no connection: {_quote(said)}",
        hint=f"`{_login(host)} true` must work without a question",
    )


def config_not_followed(host: HostSpec, asked: Sequence[str]) -> LaunchError:
    """To pass over what ssh_config says would lead elsewhere."""
    return LaunchError(
        f"host {host.name}: ssh_config asks for what this way to hosts does not know: {', '.join(asked)}",
        hint="reach hosts with the system's client, which knows all of it: `--transport openssh`",
    )


def no_common_cipher(host: HostSpec, said: str) -> LaunchError:
    """They have no algorithm in common."""
    return LaunchError(
        f"host {host.name}: cannot agree with the server at {_place(host)} on how to encrypt: {_quote(said)}",
        hint="the server is much older or stricter than this client; the other one may know its ways: "
        "`--transport openssh` or `--transport ssh`",
    )


def closed_early(host: HostSpec, said: str) -> LaunchError:
    """The server hung up before anybody had logged in."""
    return LaunchError(
        f"host {host.name}: the server at {_place(host)} closed the connection before the login: {_quote(said)}",
        hint=f"its log says why; `{_login(host)} true` shows the rest, with -v in detail",
    )


def never_started(
    host: HostSpec, argv: Sequence[str], status: int | None, *, stdout: str = "", stderr: str = ""
) -> LaunchError:
    """The login went well, and the command did not start.

    Args:
        host: the host.
        argv: the command.
        status: exit status of the login shell; None if it neither ended nor started the command.
        stdout: text that came on stdout.
        stderr: text that came on stderr.
    """
    if status in (NOT_FOUND, NOT_EXECUTABLE):
        return LaunchError(
            f"host {host.name}: cannot run {argv[0]!r}: there is no such program there",
            hint="install dsrun there under the same path, or name that host's interpreter: `python=` in the hostfile",
        )
    said = f", and says: {_quote(stderr or stdout)}" if (stderr or stdout).strip() else ""
    if status is None:
        return LaunchError(
            f"host {host.name}: logged in, but its shell did not start the command in time{said}",
            hint=f"see what `{_login(host)} true` waits for: a shell start-up file, a home folder, a question; "
            f"{WAIT_LONGER}",
        )
    return LaunchError(
        f"host {host.name}: logged in, but its shell ended with {status} and did not start the command{said}",
        hint=f"see that `{_login(host)} true` works: a login shell, a forced command or a start-up file may forbid it",
    )


def from_client(
    host: HostSpec, argv: Sequence[str], status: int, *, timeout_s: float, stderr: str, stdout: str
) -> LaunchError:
    """Tells from how the system's client ended why the command did not start.

    Args:
        host: the host.
        argv: the command.
        status: the client's.
        timeout_s: seconds that the client was to wait for the server.
        stderr: text of the client's stderr.
        stdout: text that came from the host on stdout.
    """
    if status != SSH_FAILED:
        return never_started(host, argv, status, stdout=stdout, stderr=stderr)
    for pattern, explain in _CAUSES:
        found = pattern.search(stderr)
        if found:
            return explain(host, found, timeout_s)
    return LaunchError(
        f"host {host.name}: ssh failed: {_quote(stderr) if stderr.strip() else 'it did not say why'}",
        hint=f"`{_login(host)} true` shows it, with -v in detail",
    )


_Explain = Callable[[HostSpec, "re.Match[str]", float], LaunchError]


def _cause(pattern: str, explain: _Explain) -> tuple[re.Pattern[str], _Explain]:
    return re.compile(pattern, re.MULTILINE), explain


#: The first that matches counts: a changed key is followed by other complaints.
_CAUSES: tuple[tuple[re.Pattern[str], _Explain], ...] = (
    _cause(r"REMOTE HOST IDENTIFICATION HAS CHANGED|REVOKED HOST KEY", lambda host, _, __: host_key_changed(host)),
    _cause(r"Host key verification failed|host key is known for", lambda host, _, __: host_key_unknown(host)),
    _cause(r"Could not resolve hostname", lambda host, _, __: unknown_name(host)),
    _cause(r"Connection refused", lambda host, _, __: refused(host)),
    _cause(r"timed out", lambda host, _, timeout_s: no_answer(host, timeout_s)),
    _cause(r"(No route to host|Network is unreachable)", lambda host, found, _: unreachable(host, found[1])),
    _cause(
        r"Permission denied \(([\w,-]+)\)",
        lambda host, found, _: not_let_in(host, found[1].split(",")),
    ),
    _cause(r"Too many authentication failures", lambda host, _, __: not_let_in(host)),
    _cause(r"^.*no matching .* found.*$", lambda host, found, _: no_common_cipher(host, found[0])),
    # With all that was said before: a proxy's own words are among it.
    _cause(r"kex_exchange_identification", lambda host, found, _: dropped(host, found.string)),
    _cause(
        r"^.*(?:Connection (?:closed|reset) by|Connection to .* closed).*$",
        lambda host, found, _: closed_early(host, found[0]),
    ),
)


def _place(host: HostSpec) -> str:
    return host.address if host.port is None else f"{host.address} port {host.port}"


def _known_name(host: HostSpec) -> str:
    return host.address if host.port in (None, 22) else f"'[{host.address}]:{host.port}'"


def _login(host: HostSpec) -> str:
    port = "" if host.port is None else f"-p {host.port} "
    user = "" if host.user is None else f"{host.user}@"
    return f"ssh {port}{user}{host.address}"


def _quote(said: str) -> str:
    """The last lines, as many as fit into a message."""
    text = " | ".join(line.strip() for line in said.splitlines() if line.strip())
    return text if len(text) <= _QUOTE_CHARS else f"...{text[-_QUOTE_CHARS:]}"
