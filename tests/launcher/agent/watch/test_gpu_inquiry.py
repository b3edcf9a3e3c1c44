"""The driver is asked in a process of its own: an answer is passed on, and silence does not keep the agent."""

from __future__ import annotations

import selectors
import signal
import sys
import time

import psutil
import pytest

from dsrun.contract.error_file import WorkerError
from dsrun.launcher.agent.watch.gpu_inquiry import DEADLINE_S, GpuInquiry, is_of_a_gpu
from dsrun.launcher.plan.launch_plan import GpuPlace
from dsrun.launcher.protocol import GpuFinding, GpuFindings, Message

FIRST = GpuPlace(uuid="GPU-0", address="0000:1b:00.0")
SECOND = GpuPlace(uuid="GPU-1", address="0000:2b:00.0")
ANSWERS = """
import json, sys
gpus = json.loads(sys.argv[3])
print(json.dumps({"type": "gpu_findings", "rank": int(sys.argv[2]), "gpus": gpus}))
"""
HANGS = "import signal; signal.pause()"


class Asked:
    """An inquiry with a made-up process that asks."""

    def __init__(self, source: str, gpus: dict[int, GpuPlace]) -> None:
        self.sent: list[Message] = []
        self.selector = selectors.DefaultSelector()
        command = [sys.executable, "-S", "-c", source]
        self.inquiry = GpuInquiry(gpus, self.selector, self.sent.append, command=command)

    def wait(self) -> None:
        """Waits for the process to end."""
        until_s = time.monotonic() + 20
        while self.inquiry.is_open(time.monotonic() - DEADLINE_S):
            assert time.monotonic() < until_s, "no end of the answer came"
            for key, _ in self.selector.select(1):
                key.data()


def test_the_answer_goes_to_the_front_end_once() -> None:
    asked = Asked(ANSWERS, {4: FIRST, 5: FIRST, 6: SECOND})
    asked.inquiry.ask(5)
    asked.inquiry.ask(6)
    asked.wait()
    gpus = [
        GpuFinding(uuid="GPU-0", address="0000:1b:00.0", ranks=[4, 5]),
        GpuFinding(uuid="GPU-1", address="0000:2b:00.0", ranks=[6]),
    ]
    assert asked.sent == [GpuFindings(rank=5, gpus=gpus)]
    assert asked.inquiry.pid is None


def test_a_driver_that_does_not_answer_is_told_and_left() -> None:
    asked = Asked(HANGS, {4: FIRST})
    asked.inquiry.ask(4)
    pid = asked.inquiry.pid
    assert pid is not None
    now_s = time.monotonic()
    assert asked.inquiry.is_open(now_s)
    assert not asked.inquiry.is_open(now_s + DEADLINE_S)
    (told,) = asked.sent
    assert isinstance(told, GpuFindings)
    assert told.gpus[0].address == "0000:1b:00.0"
    assert told.gpus[0].faults == ["its driver did not answer within 10 s"]
    psutil.Process(pid).wait(20)


def test_an_answer_that_is_none_is_no_news() -> None:
    asked = Asked("print('no message')", {4: FIRST})
    asked.inquiry.ask(4)
    asked.wait()
    assert asked.sent == []


def test_nobody_is_asked_where_no_rank_has_a_gpu() -> None:
    asked = Asked(HANGS, {})
    asked.inquiry.ask(4)
    assert asked.inquiry.pid is None
    assert not asked.inquiry.is_open(time.monotonic())


@pytest.mark.parametrize(
    ("status", "message", "is_asked"),
    [
        (1, "AcceleratorError: CUDA error: unspecified launch failure", True),
        (1, "DistBackendError: NCCL error in: NCCLUtils.cpp:94", True),
        (1, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", True),
        (1, "ValueError: loss is nan", False),
        (-signal.SIGABRT, None, True),
        (-signal.SIGTERM, None, False),
        (3, None, False),
    ],
)
def test_the_driver_is_asked_for_what_may_be_of_a_gpu(status: int, message: str | None, is_asked: bool) -> None:
    error = None if message is None else WorkerError(message=message, traceback="Traceback ...", time_s=1.0)
    assert is_of_a_gpu(status, error) is is_asked
