"""The way between two hosts is measured by one that listens and one that drives; strangers are not served."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest

from dsrun.errors import LaunchError
from dsrun.launcher.bench.figure import Figure
from dsrun.launcher.bench.network import listen, measure
from dsrun.launcher.rendezvous.host_addresses import addresses

WORDS = {"word": "a-word", "key": "a-secret"}
pytestmark = pytest.mark.skipif(
    all(entry.unfit for entry in addresses()), reason="this machine has no address but loopback"
)


@pytest.fixture
def keep() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def way(offers: list[dict[str, Any]], **changes: object) -> dict[str, Any]:
    return {**WORDS, "offers": offers, "repetition_s": 0.02, **changes}


def test_round_trip_and_rate_of_a_way_are_measured(keep: ExitStack) -> None:
    offers = listen(WORDS, keep)["offers"]
    answer = measure(way(offers), keep)
    trip, rate = (Figure.from_json(value) for value in answer["figures"])
    assert (trip.name, trip.unit, rate.name, rate.unit) == ("round trip", "s", "TCP rate, 4 streams", "B/s")
    assert 1e-7 < trip.low <= trip.high < 10
    assert rate.low > 1e5
    assert answer["address"] in [offer["address"] for offer in offers]


def test_the_fastest_link_that_leads_there_is_taken(keep: ExitStack) -> None:
    (offer, *_) = listen(WORDS, keep)["offers"]
    with socket.create_server((offer["address"], 0)) as silent:
        faster = {"address": offer["address"], "port": silent.getsockname()[1], "taken_mbit": 400_000}
        # Nothing that knows the word is behind the fastest: it is not taken.
        assert measure(way([faster, {**offer, "taken_mbit": 10}]), keep)["address"] == offer["address"]


def test_whoever_does_not_know_the_key_is_not_served(keep: ExitStack) -> None:
    offers = listen(WORDS, keep)["offers"]
    with pytest.raises(LaunchError, match=r"ended the connection|reset by peer|broken pipe"):
        measure(way(offers, key="a-guess!"), keep)


def test_a_host_that_does_not_listen_any_more_is_told_by_its_addresses(keep: ExitStack) -> None:
    with ExitStack() as survey:
        offers = listen(WORDS, survey)["offers"]
    with pytest.raises(LaunchError, match="none of its addresses is reached from here") as caught:
        measure(way(offers), keep)
    assert offers[0]["address"] in str(caught.value)
