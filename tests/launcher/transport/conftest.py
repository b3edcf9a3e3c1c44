"""Both ways of ssh, as one fixture; what a test starts by them is ended with it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest

from dsrun.launcher.transport.base import OwnedTransport, Transport
from dsrun.launcher.transport.ssh.connection import SshTransport
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.channels import MakeTransport, RememberingChannels


@pytest.fixture(params=[SshTransport, OpensshTransport], ids=["fabric", "openssh"])
def make_transport(request: pytest.FixtureRequest) -> Generator[MakeTransport]:
    with ExitStack() as stack:

        def make(*, lease_s: float = 15, **options: Any) -> Transport:
            transport: OwnedTransport = request.param(lease_s=lease_s, **options)
            stack.callback(transport.close)
            channels = RememberingChannels(transport)
            stack.callback(channels.end_all)
            return channels

        yield make
