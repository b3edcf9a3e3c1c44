"""Which failure came first, and the exit code that the whole job gets for it. Pure: no I/O."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from dsrun.errors import UsageError

from .nccl_report import findings, lines_of
from .rank_actions import waited_words
from .report import EXIT_HANG, EXIT_HOST_LOST, FailureReport, Hang, HostLoss, RankEnd, UserStop, exit_code_of

#: How ranks end that are stopped: by the signal of the first failure or of the user, or when the grace is over.
_STATUSES_OF_A_STOP = tuple(-s for s in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP))
#: Two failures this close in time may be told in the wrong order. See [Note: followers] in `recognise.py`.
DOUBT_S = 2.0


def judge(
    ends: Sequence[RankEnd],
    losses: Sequence[HostLoss],
    user_stop: UserStop | None,
    *,
    hang: Hang | None = None,
    stopped_at_s: float | None = None,
) -> tuple[int, FailureReport | None]:
    """Finds what ended the job.

    Args:
        ends: every rank of the job.
        losses: hosts that were lost.
        user_stop: the user's first request, if there was one.
        hang: hang that the job was ended for; None if it did not hang.
        stopped_at_s: time when the ranks were first asked to end, None if they were not; failures after that may be a
            result of it.

    Returns:
        the job's exit code, and the report where it failed by itself. A user's stop has no report: what ranks
        do after it is its consequence.
    """
    ends = _without_stop(ends, stopped_at_s)
    causes: list[tuple[float, RankEnd | HostLoss | UserStop | Hang]] = [(loss.time_s, loss) for loss in losses]
    causes += [
        (end.failed_at_s, end) for end in ends if end.failed_at_s is not None and not _is_part_of(user_stop, end)
    ]
    causes += [(event.time_s, event) for event in (user_stop, hang) if event is not None]
    if not causes:
        assert all(end.status == 0 for end in ends), "a rank without a status on a host that was not lost"
        return 0, None
    first_s, cause = min(causes, key=lambda timed: timed[0])
    if isinstance(cause, RankEnd) and cause.follows:
        cause = _leader(cause, first_s, causes, stopped_at_s)
    if isinstance(cause, RankEnd):
        cause = _origin(cause, ends)
    match cause:
        case UserStop():
            return 128 + cause.signal, None
        case HostLoss():
            code = UsageError.exit_code if cause.is_mistake else EXIT_HOST_LOST
        case Hang():
            code = EXIT_HANG
        case RankEnd():
            assert cause.status, "a failing rank has a status"
            code = exit_code_of(cause.status)
    others = [end for end in ends if end is not cause and end.status != 0]
    never_ran = sum(end.status is None and end.pid is None for end in others)
    by_themselves = [end for end in others if end.status not in (None, -signal.SIGTERM, -signal.SIGKILL)]
    followed = sum(end.follows for end in by_themselves)
    return code, FailureReport(
        cause=cause,
        exit_code=code,
        stopped=len(others) - len(by_themselves) - never_ran,
        followed=followed,
        also_failed=len(by_themselves) - followed,
        also_lost=tuple(loss for loss in losses if loss is not cause),
        returned_before=_returned_before(cause, ends, stopped_at_s),
        said_by_all=isinstance(cause, RankEnd) and _is_said_by_all(cause, ends),
        witness=_witness(cause, others) if isinstance(cause, RankEnd) else None,
        collectives=_collectives(cause, ends),
        waited=waited_words(
            {end.rank: end.collective for end in others if end.collective},
            {end.rank: end.coordinate for end in ends},
        ),
    )


def _origin(cause: RankEnd, ends: Sequence[RankEnd]) -> RankEnd:
    """Finds the rank whose own exception the cause repeats: all ranks raise what one of them has met, in any order."""
    word, failed_at_s = cause.error, cause.failed_at_s
    if word is None or failed_at_s is None or not word.is_rendered or cause.is_mistake:
        return cause
    named = {int(rank) for rank in re.findall(r"\brank (\d+)\b", word.message)}
    for end in ends:
        own = end.error
        if not end.status or end.rank not in named or own is None or own.is_rendered or end.knows_little:
            continue
        if own.time_s <= failed_at_s + DOUBT_S:
            return end
    return cause


def _is_part_of(stop: UserStop | None, end: RankEnd) -> bool:
    """Whether a rank died of the very signal that stopped the job. See [Note: one end told twice] in shutdown."""
    if stop is None or end.failed_at_s is None:
        return False
    return end.status == -stop.signal and abs(end.failed_at_s - stop.time_s) <= DOUBT_S


def _returned_before(
    cause: RankEnd | HostLoss | Hang, ends: Sequence[RankEnd], stopped_at_s: float | None
) -> tuple[int, ...]:
    if not isinstance(cause, RankEnd) or not cause.follows or cause.failed_at_s is None:
        return ()
    # Its peers see the closed connection before the process is reaped; after the stop a return may be because of it.
    until_s = cause.failed_at_s + DOUBT_S
    if stopped_at_s is not None:
        until_s = min(until_s, stopped_at_s)
    return tuple(end.rank for end in ends if end.status == 0 and end.time_s is not None and end.time_s <= until_s)


def _is_said_by_all(cause: RankEnd, ends: Sequence[RankEnd]) -> bool:
    words = None if cause.error is None else cause.error.message
    return words is not None and all(
        end.error is not None and end.error.message == words for end in ends if end.pid is not None
    )


def _witness(cause: RankEnd, others: Sequence[RankEnd]) -> RankEnd | None:
    """Finds who tells more of the first failure than torch did there: by an error of dsrun that names its rank."""
    if not cause.knows_little or cause.failed_at_s is None:
        return None
    until_s = cause.failed_at_s + DOUBT_S
    named = re.compile(rf"\brank {cause.rank}\b")
    for end in others:
        word = end.error
        if word is not None and word.is_rendered and word.time_s <= until_s and named.search(word.message):
            return end
    return None


def _collectives(cause: RankEnd | HostLoss | Hang, ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """Says who waited for whom, from the dumps that torch has all ranks write before it ends one for a time-out."""
    if not isinstance(cause, RankEnd) or cause.cause is None or not cause.cause.timed_out:
        return ()
    return tuple(lines_of(findings({end.rank: end.groups for end in ends if end.groups is not None})))


def _without_stop(ends: Sequence[RankEnd], stopped_at_s: float | None) -> list[RankEnd]:
    """Gives ranks that had raised before the stop, and died of it while they tore down, the code of their exception."""
    if stopped_at_s is None:
        return list(ends)
    judged: list[RankEnd] = []
    for end in ends:
        word, time_s = end.error, end.time_s
        if word is None or time_s is None or end.status not in _STATUSES_OF_A_STOP:
            judged.append(end)
        elif word.time_s < stopped_at_s <= time_s:
            # What another than us has written says no code: python's own for an exception.
            judged.append(replace(end, status=word.exit_code or 1, cut_short=True))
        else:
            judged.append(end)
    return judged


def _leader(
    follower: RankEnd,
    since_s: float,
    causes: Sequence[tuple[float, RankEnd | HostLoss | UserStop | Hang]],
    stopped_at_s: float | None,
) -> RankEnd | HostLoss | UserStop | Hang:
    """Finds whom a follower followed: the first that failed by itself, if that was at nearly the same time."""
    close = sorted((timed for timed in causes if timed[0] <= since_s + DOUBT_S), key=lambda timed: timed[0])
    for time_s, other in close:
        match other:
            case RankEnd() if other.follows or other.status == -signal.SIGTERM:
                continue
            case RankEnd(error=None, status=status) if status and status > 0:
                # A program that ends with a code of its own when it is asked to end has not failed.
                if stopped_at_s is None or time_s < stopped_at_s:
                    return other
            case _:
                return other
    return follower
