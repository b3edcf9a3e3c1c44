"""Process groups beside the default one, shared by all meshes that need the same.

An NCCL communicator of eight GPUs takes hundreds of MB of device memory, and torch keeps a group until it is destroyed
by name. An actor, a critic, a reference and a reward model in one process need one such group, and not four.

[Note: same on every rank] Making a group enters collectives, and so does destroying NCCL's: ncclCommDestroy waits for
the other ranks of the host. So whether a group is there must be the same on every rank at each call: a group goes when
the last mesh on it was *left*, which all ranks do at one place of the script. A mesh that was dropped instead is freed
when Python pleases, which differs by rank; its groups stay, and the next mesh gets them.

[Note: own groups] A rank makes the groups that it is in and no others: with thousands of ranks, a call of all of them
for each group of each axis takes minutes. So all groups of a view are made at once, each by its own ranks; and all
ranks make those of one view before those of the next, for groups that overlap and are made in other orders wait for
each other. Gloo's ranks meet among themselves, see [Note: own names]. NCCL's are a split of the default communicator,
one call a view, where that is bound to a device as `join` binds it. A script's own default group may not be: then torch
only notes the groups of others, and no rank waits for them.

[Note: own names] The ranks of a Gloo group meet under its name. torch's name for a group that its own ranks make counts
the groups that the caller has, and ranks may differ in that: those of an axis that spans hosts have one more, and a
script makes groups as it likes. So the name is ours: what the group is for, its ranks, and how often these have made
one for this. Only the group's ranks count that, and each of them counts the same.

[Note: Gloo's groups stay] A Gloo group holds some sockets and threads and no device memory. So it stays for the next
mesh that needs it, which then waits for nobody, and ends with the default group.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from ...compat import backends_of, new_named_group
from ..point_to_point.make import LinkPurpose
from .backends import Backend

#: The same ranks may have several groups: one for everything, another for sums alone, one to share memory by, of those
#: ranks of an axis that are on one host, and those for messages between two.
Purpose = Literal["all", "reductions", "host"] | LinkPurpose


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What two meshes need alike.

    Attributes:
        backend: backend of the group.
        purpose: use of the group.
        ranks: ranks of the group, by their numbers in the job, ascending.
    """

    backend: Backend
    purpose: Purpose
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Shared:
    """A group, and how many meshes are on it; none are on a Gloo group that waits."""

    group: dist.ProcessGroup
    users: int = 0


class SharedGroups:
    """The groups that meshes of one default group have; see [Note: same on every rank].

    Args:
        timeout_s: seconds that the groups' collectives wait for the other ranks.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._shared: dict[GroupKey, _Shared] = {}
        self._times_made: Counter[GroupKey] = Counter()

    def __len__(self) -> int:
        """Returns how many groups meshes are on."""
        return sum(shared.users > 0 for shared in self._shared.values())

    def take(self, key: GroupKey, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """Returns this rank's group, which is made where no mesh has it.

        Every rank of the job must call; for a group of Gloo's, every rank of the group.

        Args:
            key: the group.
            groups: ranks of all groups that are made together, this one among them: each rank of the job is in one.
                For a group of Gloo's it alone counts.
        """
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(self._make(key, groups))
        shared.users += 1
        return shared.group

    def find(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Returns the group by which some ranks do everything; None where they have none. No mesh is on it for that.

        Args:
            ranks: ranks of the group, by their numbers in the job, ascending.
        """
        found = (one.group for key, one in self._shared.items() if (key.purpose, key.ranks) == ("all", ranks))
        return next(found, None)

    def give_back(self, keys: Sequence[GroupKey]) -> None:
        """Says that one mesh has left these groups; every rank must call.

        Those of NCCL that no other mesh is on are destroyed. Those of Gloo wait for another mesh, see [Note: Gloo's
        groups stay].
        """
        for key in keys:
            shared = self._shared[key]
            shared.users -= 1
            if shared.users or key.backend == "gloo":
                continue
            del self._shared[key]
            dist.destroy_process_group(shared.group)

    def forget(self) -> None:
        """Lets go of all groups, which end with the default group."""
        self._shared.clear()

    def _make(self, key: GroupKey, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """Makes a group, see [Note: own groups]."""
        if key.backend == "gloo":
            name = _name_of(key, self._times_made[key])
            self._times_made[key] += 1
            made = new_named_group(key.ranks, backend="gloo", name=name, timeout=self._timeout)
        elif len(groups) > 1 and may_split():
            made = dist.split_group(split_ranks=[list(ranks) for ranks in groups], timeout=self._timeout)
        else:
            # The backend is named: as the default group has it, a group would get NCCL's and Gloo's part.
            every = [dist.new_group(list(ranks), backend="nccl", timeout=self._timeout) for ranks in groups]
            made = every[groups.index(key.ranks)]
        assert isinstance(made, dist.ProcessGroup), "this rank is in the group"
        return made


def _name_of(key: GroupKey, number: int) -> str:
    """Returns a name, see [Note: own names]; the ranks of a large job would make a long one."""
    ranks = hashlib.sha256("_".join(map(str, key.ranks)).encode()).hexdigest()
    return f"dsrun/{key.purpose}/{ranks}/{number}"


def may_split() -> bool:
    """Whether the default group is NCCL's alone and bound to a device: torch splits no other."""
    world = dist.group.WORLD
    return world is not None and world.bound_device_id is not None and backends_of(world) == {"cuda": "nccl"}
