"""Frames are sent in order; a sign of life passes those that wait, and never piles up."""

from __future__ import annotations

import os
import selectors

from dsrun.launcher.agent.relay import Relay
from dsrun.launcher.protocol import Failed, FrameReader, Message, Output, Pulse, Reading


def read_all(relay: Relay, selector: selectors.BaseSelector, read_fd: int) -> list[Message]:
    reader = FrameReader()
    messages: list[Message] = []
    os.set_blocking(read_fd, False)
    while True:
        try:
            messages += reader.feed(os.read(read_fd, 1 << 20))
        except BlockingIOError:
            if not selector.get_map():
                return messages
        for key, _ in selector.select(0):
            key.data()


def test_a_sign_of_life_passes_frames_that_wait_and_replaces_the_one_before() -> None:
    read_fd, write_fd = os.pipe()
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, write_fd)
        waiting = [Failed(reason=f"{number}" + "x" * 100_000, time_s=0.0) for number in range(3)]
        for message in waiting:
            relay.send(message)
        for time_s in (1.0, 2.0, 3.0):
            relay.send_sign_of_life(Pulse(ranks=[], time_s=time_s))
        messages = read_all(relay, selector, read_fd)
        assert messages == [waiting[0], Pulse(ranks=[], time_s=3.0), *waiting[1:]]
        relay.send_sign_of_life(Pulse(ranks=[], time_s=4.0))
        assert read_all(relay, selector, read_fd) == [Pulse(ranks=[], time_s=4.0)]
    os.close(read_fd)
    os.close(write_fd)


def test_a_sign_of_life_waits_alone_for_a_pipe_that_is_full() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    full = os.write(write_fd, b"\n".join([b'{"type":"lease"}'] * 10_000))
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, write_fd)
        for time_s in (1.0, 2.0):
            relay.send_sign_of_life(Pulse(ranks=[], time_s=time_s))
        seen = b""
        while len(seen) < full:
            seen += os.read(read_fd, full - len(seen))
        assert read_all(relay, selector, read_fd) == [Pulse(ranks=[], time_s=2.0)]
    os.close(read_fd)
    os.close(write_fd)


def test_a_front_end_that_reads_no_more_is_sent_no_more() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, write_fd)
        relay.send_sign_of_life(Pulse(ranks=[], time_s=1.0))
        assert relay.broken
        assert not selector.get_map()
    os.close(write_fd)


def test_what_a_rank_has_written_is_drained_and_what_is_told_meanwhile_keeps_its_place() -> None:
    read_fd, write_fd = os.pipe()
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, write_fd)
        told = [Reading(rank=0, state="typed")]
        relay.before_output = lambda: relay.send(told.pop()) if told else None
        stdout_fd, other_fd = relay.open_stream(0, "stdout"), relay.open_stream(1, "stdout")
        os.write(stdout_fd, b"hello\nname? ")
        os.write(other_fd, b"of another rank\n")
        relay.drain(0)
        relay.send(Reading(rank=0, state="waits"))
        os.close(stdout_fd)
        os.close(other_fd)
        messages = read_all(relay, selector, read_fd)
    shown = [message.text if isinstance(message, Output) else message for message in messages]
    typed, waits = Reading(rank=0, state="typed"), Reading(rank=0, state="waits")
    assert shown == [typed, "hello\nname? ", waits, "of another rank\n"]
    os.close(read_fd)
    os.close(write_fd)
