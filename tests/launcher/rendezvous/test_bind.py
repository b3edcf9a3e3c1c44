"""An address or name that all hosts were given is bound on the host that it stands for, and nowhere else."""

from __future__ import annotations

import socket

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.rendezvous.bind import addresses_of, bind_own, place_of


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_only_the_address_itself_is_bound(address: str) -> None:
    with bind_own(address, 0) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
        assert listener.getblocking()


def test_an_address_that_is_not_this_hosts_is_refused_with_the_way_out() -> None:
    # For documentation, RFC 5737: nobody has it.
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1.*is no address of this host") as caught:
        bind_own("192.0.2.1", 0)
    assert "headless service" in str(caught.value.hint)


def test_a_name_for_this_hosts_loopback_only_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"127\.0\.1\.1 is for this host alone"):
        bind_own("debian", 0, resolve=lambda name: [(socket.AF_INET, "127.0.1.1")])


def test_of_a_name_the_address_that_is_this_hosts_is_taken() -> None:
    with bind_own("localhost", 0, resolve=lambda name: [(socket.AF_INET, "192.0.2.1"), *addresses_of(name)]) as made:
        assert made.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{port}, .*already in use"):
            bind_own("127.0.0.1", port)


def test_a_name_that_nobody_knows_is_left_to_the_caller_to_try_again() -> None:
    with pytest.raises(socket.gaierror):
        bind_own("no-such-name.invalid", 0)


def test_an_ipv6_address_and_its_port_are_told_apart() -> None:
    assert (place_of("::1", 5), place_of("h", 5)) == ("[::1]:5", "h:5")
