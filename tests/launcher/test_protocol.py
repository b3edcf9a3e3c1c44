"""Messages survive the pipe, whatever bytes a rank writes and wherever the pipe cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.contract.error_file import WorkerError
from dsrun.launcher.protocol import (
    MAX_FRAME_BYTES,
    VERSION,
    Collective,
    Exit,
    Failed,
    Finished,
    FrameReader,
    GpuFinding,
    GpuFindings,
    GroupProgress,
    Hello,
    Kill,
    Message,
    Note,
    OomKill,
    Output,
    Peers,
    ProtocolError,
    RankStack,
    Records,
    Release,
    Spawn,
    Stacks,
    Start,
    Started,
    Stop,
    decode,
    encode,
)

GROUP = GroupProgress(
    name="0",
    label="default_pg",
    members="0-3",
    waits=Collective(number=57, name="all_reduce", data="[8] Float", state="scheduled", line="train.py:3"),
)
MESSAGES: list[Message] = [
    Start(plan={"job_id": "a", "nodes": []}, node_rank=0),
    Stop(signal=15),
    Kill(),
    Hello(pid=4, time_s=1.5),
    Hello(pid=4, time_s=1.5, addresses=["10.0.0.1"]),
    Peers(addresses=[["10.0.0.2", "fd00::2"], []]),
    Started(pids=[1, 2]),
    Output(rank=0, stream="stderr", sequence=3, time_s=1.5, text="a\nb"),
    Exit(rank=1, status=-9, time_s=2.0),
    GpuFindings(rank=1, gpus=[GpuFinding(index=0, uuid="GPU-0", ranks=[1], faults=["Xid 79"]), GpuFinding()]),
    Exit(rank=1, status=-9, time_s=2.0, oom=OomKill(by="limit", group="/job", limit_bytes=1 << 30)),
    Exit(rank=1, status=1, time_s=2.0, error=WorkerError(message="m", traceback="t", time_s=1.9)),
    Exit(rank=1, status=-6, time_s=2.0, groups=[GROUP], coordinate="data 1, tensor 0"),
    Exit(rank=1, status=-9, time_s=2.0, step=4, phase="forward", collective="all_reduce of unit 1"),
    Stacks(
        ranks=[
            RankStack(
                rank=3,
                state="R",
                kernel="",
                text="",
                phase="",
                collective="",
                step=None,
                idle_s=None,
                uses_gpu=True,
                uses_nccl=True,
                groups=[GROUP],
                dump_error="is damaged",
            )
        ]
    ),
    Failed(reason="no", time_s=1.0),
    Failed(reason="no", time_s=1.0, hint="way out", is_mistake=True),
    Records(text='{"event": "step"}\n'),
    Note(text="ä"),
    Finished(unkillable=[]),
    Spawn(
        plan={},
        node_rank=0,
        agent_pid=7,
        master_addr="127.0.0.1",
        master_port=1,
        store_fd=None,
        output_fds=[],
        cpus=[None, [0, 1]],
    ),
    Release(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_equal(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_frame_is_one_ascii_line() -> None:
    frame = encode(Output(rank=0, stream="stdout", sequence=0, time_s=0.0, text="ä\n\r\0\udcff"))
    assert frame.isascii()
    assert frame.count(b"\n") == 1
    assert frame.endswith(b"\n")


@given(st.binary(), st.integers(min_value=0))
def test_output_keeps_every_byte_even_if_cut_inside_a_character(data: bytes, cut: int) -> None:
    cut %= len(data) + 1
    back = b""
    for chunk in (data[:cut], data[cut:]):
        text = chunk.decode("utf-8", "surrogateescape")
        message = decode(encode(Output(rank=0, stream="stdout", sequence=0, time_s=0.0, text=text)))
        assert isinstance(message, Output)
        back += message.text.encode("utf-8", "surrogateescape")
    assert back == data


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_reader_finds_messages_wherever_the_pipe_cuts(size: int) -> None:
    stream = b"".join(encode(message) for message in MESSAGES if not isinstance(message, Spawn))
    reader = FrameReader()
    found = [message for at in range(0, len(stream), size) for message in reader.feed(stream[at : at + size])]
    assert found == [message for message in MESSAGES if not isinstance(message, Spawn)]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Welcome to host7!",
        b"[]",
        b"{}",
        b'{"type":"nothing"}',
        b'{"type":"stop"}',
        b'{"type":"kill","x":1}',
        b"\xff",
    ],
)
def test_what_is_no_message_is_refused_and_shown(line: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"expected a message of version {VERSION}"):
        decode(line)


def test_an_endless_frame_is_refused_before_it_fills_the_memory() -> None:
    reader = FrameReader()
    chunk = b"x" * (1 << 20)
    for _ in range(MAX_FRAME_BYTES // len(chunk)):
        assert reader.feed(chunk) == []
    with pytest.raises(ProtocolError, match="longer than"):
        reader.feed(chunk)
