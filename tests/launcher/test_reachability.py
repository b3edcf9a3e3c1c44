"""An address is reached where the word comes back, and nowhere else; inner networks of a host are told apart."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dsrun.errors import DsrunError
from dsrun.launcher.reachability import Address, addresses, listen, of_interfaces, reach, why_unfit


def offers_on(interface: str, word: str, keep: ExitStack) -> list[dict[str, Any]]:
    return listen({"word": word, "interfaces": [interface]}, keep)["offers"]


def try_to_reach(word: str, *targets: tuple[str, int], patience_s: float = 20.0) -> list[dict[str, Any]]:
    with ExitStack() as keep:
        asked = [{"address": address, "port": port, "word": word} for address, port in targets]
        return reach({"patience_s": patience_s, "targets": asked}, keep)


@contextmanager
def foreign_service(says: bytes) -> Generator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(20)


def test_an_address_with_the_word_is_reached_through_an_interface_of_ones_own() -> None:
    with ExitStack() as keep:
        (port,) = [offer["port"] for offer in offers_on("lo", "word", keep) if offer["address"] == "127.0.0.1"]
        assert (
            try_to_reach("word", ("127.0.0.1", port), ("127.0.0.1", port))
            == [{"source": "127.0.0.1", "interface": "lo", "speed_mbit": None}] * 2
        )


def test_ipv6_is_reached_too() -> None:
    with ExitStack() as keep:
        ports = [offer["port"] for offer in offers_on("lo", "word", keep) if offer["address"] == "::1"]
        if not ports:
            pytest.skip("this machine has no ::1")
        assert try_to_reach("word", ("::1", ports[0]))[0]["source"] == "::1"


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-x\r\n", b"wor", b"words"])
def test_a_service_of_somebody_else_is_not_taken_for_the_host(says: bytes) -> None:
    with foreign_service(says) as port:
        assert try_to_reach("word", ("127.0.0.1", port)) == [{"fault": "something else answers there"}]


def test_a_service_that_says_nothing_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert try_to_reach("word", ("127.0.0.1", port), patience_s=0.2) == [{"fault": "no answer"}]


def test_other_ways_to_a_host_that_is_reached_are_not_waited_for_long() -> None:
    with ExitStack() as keep, socket.create_server(("127.0.0.1", 0)) as silent:
        (port,) = [offer["port"] for offer in offers_on("lo", "word", keep) if offer["address"] == "127.0.0.1"]
        targets = [
            {"address": "127.0.0.1", "port": port, "word": "word"},
            {"address": "127.0.0.1", "port": silent.getsockname()[1], "word": "word"},
        ]
        began_s = time.monotonic()
        answers = reach({"targets": targets, "patience_s": 600.0, "rest_s": 0.1}, keep)
        assert time.monotonic() - began_s < 60
    assert ["fault" in answer for answer in answers] == [False, True]


def test_nobody_listens_any_more_once_the_survey_is_over() -> None:
    with ExitStack() as keep:
        ports = [offer["port"] for offer in offers_on("lo", "word", keep)]
    assert try_to_reach("word", ("127.0.0.1", ports[0])) == [{"fault": "connection refused"}]


@pytest.mark.parametrize(
    ("address", "interface", "is_fit"),
    [
        ("10.0.0.1", "eth0", True),
        ("10.0.0.1", "br-lan", True),
        ("10.0.0.1", "br0", True),
        ("10.255.0.1", "lo", True),
        ("169.254.1.1", "eth0", True),
        ("fd00::1", "ib0", True),
        ("127.0.0.1", "lo", False),
        ("127.0.1.1", "lo", False),
        ("::1", "lo", False),
        ("fe80::1", "eth0", False),
        ("172.17.0.1", "docker0", False),
        ("172.18.0.1", "br-0123456789ab", False),
        ("192.168.122.1", "virbr0", False),
        ("10.244.0.0", "flannel.1", False),
        ("10.244.0.1", "cni0", False),
        ("10.0.0.9", "vethab12", False),
    ],
)
def test_loopback_link_local_and_networks_inside_the_host_are_unfit(address: str, interface: str, is_fit: bool) -> None:
    assert (why_unfit(address, interface) is None) == is_fit


def address(text: str, interface: str, unfit: str | None = None) -> Address:
    return Address(address=text, interface=interface, prefix=None, speed_mbit=None, unfit=unfit)


def test_a_name_stands_for_its_interface_or_for_all_that_begin_with_it() -> None:
    eth0, ib0, ib1, docker = (
        address("10.0.0.1", "eth0"),
        address("10.1.0.1", "ib0"),
        address("10.2.0.1", "ib1"),
        address("172.17.0.1", "docker0", "inner"),
    )
    local = address("fe80::1", "ib0", "link-local")
    found = [eth0, docker, ib0, local, ib1]
    assert of_interfaces(found, ["ib", "eth0"]) == [ib0, ib1, eth0]
    assert of_interfaces(found, ["ib1", "ib"]) == [ib1, ib0]
    # Whoever names a bridge of containers means it; that all hosts reach it is still to be proved.
    assert of_interfaces(found, ["docker0"]) == [docker]
    with pytest.raises(DsrunError) as caught:
        of_interfaces(found, ["eth1"])
    assert caught.value.hint == "there is eth0 (10.0.0.1), docker0 (172.17.0.1), ib0 (10.1.0.1), ib1 (10.2.0.1)"


def test_this_machines_loopback_is_listed_with_its_network() -> None:
    (loopback,) = [entry for entry in addresses() if entry.address == "127.0.0.1"]
    assert (loopback.interface, loopback.prefix, loopback.unfit) == ("lo", 8, "loopback")
