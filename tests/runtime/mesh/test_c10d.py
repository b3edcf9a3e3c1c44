"""Ranks that only torch.distributed connects hear within the time-out where the others are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsrun.contract.environment import RankInfo
from dsrun.errors import DsrunError
from dsrun.runtime.compat import store_of
from dsrun.runtime.mesh.c10d import C10dCollectives, GlooCollectives
from dsrun.runtime.mesh.collectives import WaitKind
from dsrun.runtime.mesh.join.groups import join
from dsrun.runtime.mesh.step_position import Where
from support.ranks import run_ranks, wait_for_all


def _wait_in_vain(axis: GlooCollectives) -> None:
    if axis.rank == 0:
        axis.all_gather(torch.zeros(8), torch.zeros(4), label="unit 4").wait()
    else:
        axis.broadcast(torch.zeros(4), source=0, label="unit 6").wait()


def _part(how: str) -> str:
    info = RankInfo.from_env()
    wait_for_all(info)
    join(info, backend="gloo", device=torch.device("cpu"), timeout_s=2)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    where = Where()
    axis = GlooCollectives(group, where=where)
    axis.all_reduce(torch.zeros(4), label="unit 1").wait()
    where.at(9 if info.rank == 0 else 8, 2)
    if info.rank == 1 and how == "leaves":
        axis.close()
        return str(axis.is_idle)
    if info.rank == 1:
        # What rank 0 sends in its all-gather: without names, Gloo takes one for the other.
        axis.broadcast(torch.zeros(4), source=0, label="unit 5").wait()
    with pytest.raises(DsrunError) as caught:
        _wait_in_vain(axis)
    # A group with work under way must not be let go of: see [Note: leaving] in groups.
    return f"{axis.is_idle} {caught.value}"


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_a_rank_that_has_left_is_named_with_the_step_it_left_at() -> None:
    zero, one = run_ranks(2, _part, "leaves")
    assert zero.startswith(
        "False rank 0 waited in all_gather of unit 4 at step 9, micro step 2, which not all ranks joined: "
        "rank 1 has left the job at step 8, micro step 2 ("
    )
    assert one == "True"


@pytest.mark.depends_on_speed("a time-out of 2 s")
def test_ranks_in_other_collectives_tell_each_other_where_they_wait() -> None:
    zero, one = run_ranks(2, _part, "other call")
    assert "joined: rank 1 waited in broadcast of unit 6 at step 8, micro step 2 (" in zero
    assert "joined: rank 0 waited in all_gather of unit 4 at step 9, micro step 2 (" in one


def _two_groups() -> list[str]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=torch.device("cpu"), timeout_s=30)
    group, other = dist.group.WORLD, dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(other, dist.ProcessGroup)
    axis = C10dCollectives(group, reductions=other)
    # On one communicator these would be each other's counterparts, in the order in which a rank calls.
    gathered, summed = torch.zeros(2), torch.full((2,), 1.0 + info.rank)
    own = torch.full((1,), 5.0 + info.rank)
    works = [
        lambda: axis.all_gather(gathered, own),
        lambda: axis.all_reduce(summed),
    ]
    for work in [begin() for begin in (works if info.rank == 0 else works[::-1])]:
        work.wait()
    return [str(gathered.tolist()), str(summed.tolist())]


def test_gathers_and_reductions_do_not_wait_for_each_other() -> None:
    assert run_ranks(2, _two_groups) == [["[5.0, 6.0]", "[3.0, 3.0]"]] * 2


class _Heard:
    """Notes what an observer is told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.kinds: list[WaitKind] = []
        self.waited_s: list[float] = []

    def enter(self, collective: str, kind: WaitKind) -> None:
        self.words.append(collective)
        self.kinds.append(kind)

    def leave(self, waited_s: float) -> None:
        self.words.append("over")
        self.waited_s.append(waited_s)


def _alone(heard: _Heard, *, blocks_host: bool, two_groups: bool = True) -> C10dCollectives:
    """One rank over Gloo; where it does not block the host, as NCCL."""
    join(RankInfo(), backend="gloo", device=torch.device("cpu"), timeout_s=5)
    group, other = dist.group.WORLD, dist.new_group([0]) if two_groups else None
    assert isinstance(group, dist.ProcessGroup)
    assert other is None or isinstance(other, dist.ProcessGroup)
    return C10dCollectives(group, heard, reductions=other, blocks_host=blocks_host)


def test_a_read_names_what_was_begun_last_where_waits_do_not_block_the_host() -> None:
    heard = _Heard()
    axis = _alone(heard, blocks_host=False)
    axis.all_gather(torch.zeros(4), torch.zeros(4), label="unit 11")
    gather = axis.all_gather(torch.zeros(4), torch.zeros(4), label="unit 12")
    axis.reduce_scatter(torch.zeros(4), label="unit 3").wait()
    heard.words.clear()
    with axis.reading("gradient norm"):
        assert heard.words == [
            "results of gradient norm, last begun all_gather of unit 12 and reduce_scatter of unit 3"
        ]
    assert heard.words[1:] == ["over"]
    assert heard.kinds[-2:] == [WaitKind.STREAM, WaitKind.READ]
    # The reduction was over when the read was; the gather was not waited for.
    heard.words.clear()
    with axis.reading("mean loss"):
        assert heard.words == ["results of mean loss, last begun all_gather of unit 12"]
    gather.wait()
    with axis.reading("mean loss"):
        pass
    heard.words.clear()
    with axis.reading("mean loss"):
        assert heard.words == ["results of mean loss"]


def test_the_name_of_a_read_that_failed_stays() -> None:
    heard = _Heard()
    axis = _alone(heard, blocks_host=False, two_groups=False)
    axis.all_gather(torch.zeros(4), torch.zeros(4), label="unit 1")
    axis.all_reduce(torch.zeros(4), label="unit 2").wait()
    heard.words.clear()
    with pytest.raises(ValueError, match="no"), axis.reading("gradient norm"):
        raise ValueError("no")
    # One communicator has one order, so one name.
    assert heard.words == ["results of gradient norm, last begun all_reduce of unit 2"]


def test_the_name_of_a_read_fits_a_heartbeat() -> None:
    heard = _Heard()
    axis = _alone(heard, blocks_host=False)
    axis.all_gather(torch.zeros(4), torch.zeros(4), label="unit model." + 20 * "language_model.").wait()
    axis.reduce_scatter(torch.zeros(4), label="unit model.decoder.layers.31").wait()
    heard.words.clear()
    with axis.reading("gradient norm and mean loss"):
        pass
    assert heard.words[0] == (
        "results of gradient norm and mean loss, last begun all_gather o...guage_model. and reduce_scatt...er.layers.31"
    )
    assert len(heard.words[0]) <= 112


def test_a_read_says_nothing_where_waits_block_the_host() -> None:
    heard = _Heard()
    axis = _alone(heard, blocks_host=True)
    axis.all_reduce(torch.zeros(4), label="unit 1").wait()
    assert heard.kinds == [WaitKind.THREAD]
    heard.words.clear()
    with axis.reading("gradient norm"):
        pass
    assert heard.words == []


def _ends_unwaited() -> list[bool]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=torch.device("cpu"), timeout_s=30)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    axis = C10dCollectives(group)
    store = store_of(group)
    if info.rank == 1:
        store.wait(["rank 0 has looked"])
    ahead = axis.all_gather(torch.zeros(2), torch.ones(1), label="unit 1")
    seen = [True]
    if info.rank == 0:
        seen = [not axis.is_idle and not axis.becomes_idle(patience_s=0.01)]
        store.set("rank 0 has looked", "")
    # Nobody waits for it, as for a gather ahead of a step that never comes.
    seen.append(axis.becomes_idle(patience_s=30))
    ahead.wait()
    seen.append(axis.is_idle)
    axis.all_gather(torch.zeros(2), torch.ones(1), label="unit 2")
    # With its handle went the only word of its end; that is no reason to wait.
    seen.append(axis.becomes_idle(patience_s=3600))
    return seen


def test_an_axis_is_idle_when_what_was_begun_has_ended_though_nobody_waited() -> None:
    assert run_ranks(2, _ends_unwaited) == [[True, True, True, False]] * 2


def test_a_barrier_has_the_host_read_its_result_where_waits_do_not_block_it() -> None:
    heard = _Heard()
    _alone(heard, blocks_host=False).barrier()
    assert heard.words == ["barrier", "over", "results of barrier, last begun barrier", "over"]
    heard = _Heard()
    _alone(heard, blocks_host=True).barrier()
    assert heard.words == ["barrier", "over"]
