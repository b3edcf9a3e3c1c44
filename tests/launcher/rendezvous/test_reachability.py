"""An address is reached where the word comes back, and nowhere else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dsrun.launcher.rendezvous.reachability import following, listen, listen_rails, reach


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
            == [
                {
                    "source": "127.0.0.1",
                    "interface": "lo",
                    "speed_mbit": None,
                    "kind": "virtual",
                    "driver": None,
                    "cards": (),
                }
            ]
            * 2
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


def test_rails_are_listened_at_only_where_nccl_takes_the_interfaces_that_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    asked = {"word": "w", "addresses": ["127.0.0.1", "127.0.0.1"]}
    with ExitStack() as keep:
        found = listen_rails({**asked, "env": {"NCCL_IB_DISABLE": "1"}}, keep)
        assert found["no_sockets"] is None
        targets = [("127.0.0.1", port) for port in found["ports"]]
        assert [way["interface"] for way in try_to_reach("w", *targets)] == ["lo", "lo"]
        own = listen_rails({**asked, "env": {"NCCL_SOCKET_IFNAME": "eth7"}}, keep)
    assert own == {"ports": [], "no_sockets": "NCCL_SOCKET_IFNAME is set"}


def test_a_host_of_a_large_job_tries_those_that_follow_it() -> None:
    names = [f"n{number}" for number in range(100)]
    assert following(names[:4], "n2") == ["n3", "n0", "n1"]
    assert following(names, "n90") == [*names[91:], *names[:55]]
