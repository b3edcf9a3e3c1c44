"""A job's turn and its share of this machine: waits for free GPUs or slots if asked to, and holds them for its life.

[Note: turn] A job that waits has a ticket. Tickets are served by priority, highest first, then in the order they were
taken, and a ticket waits for every earlier one that wants any of the same devices: a job for one GPU does not
overtake one for eight, which would else wait for ever; jobs that are held to different GPUs do not wait for each
other. Jobs started without `--queue` take what is free at once and look at no ticket: who starts them sits in front of
them. Slots are as many as there are usable cores; they are counted for jobs on the CPU only.

Leases and tickets are files of one user on one machine, see `leases`. GPUs in use by others are seen through the
driver. Other hosts' devices are not leased.

[Note: one machine] Containers of one machine have host names of their own, and often one home. Their folder is called
by the boot, which is the machine's in all of them and no other's; a lease is called by the GPU's UUID. Slots are
counted by each container for itself, for it may have a quota of its own of the same CPUs. Folders were called by the
host's name before: GPUs that jobs hold there count, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, UsageError
from dsrun.units import format_bytes

from ...machine.devices.choice import (
    Demand,
    Device,
    DeviceLease,
    driver_open,
    held_devices,
    read_devices,
    take_devices,
)
from ...machine.gpus.users import UNSEEN_BYTES
from ...machine.proc_files import count_usable_cores, read_text
from ..folder import state_paths
from .leases import Claim, ClaimFolder, remove_idle, safe_name

_SLOT = "slot"
#: Between two looks of a waiting job.
LOOK_EVERY_S = 0.5


@contextlib.contextmanager
def hold_devices(
    demand: Demand,
    *,
    environ: Mapping[str, str],
    queue: bool,
    priority: int,
    share: bool,
    job_id: str,
    note: Callable[[str], None],
    keep_waiting: Callable[[], bool],
    look_every_s: float = LOOK_EVERY_S,
    load_nvml: Callable[[], Any] | None = None,
) -> Generator[DeviceLease | None, None, None]:
    """Holds a job's GPUs, or its slots, for as long as the block runs.

        with hold_devices(launch.demand, ..., keep_waiting=lambda: not stops.asked) as held:
            if held is None: the user stopped waiting
            plan = launch.plan(job_id=..., run_dir=..., held=held)

    The locks are this process's: call it in the process that stays with the job (after detaching), and keep the block
    open over restarts. A job on the CPU that does not queue takes the slots that are free, waits for none and
    never fails. So does a job on GPUs where leases cannot be kept (a read-only home), with a note.

    Args:
        demand: devices and ranks that the job wants of this machine (`Launch.demand`); nothing is held for a demand
            without ranks.
        environ: CUDA_VISIBLE_DEVICES limits the choice; XDG_STATE_HOME is where leases and tickets are.
        queue: whether to wait until the devices are free and it is this job's turn. See [Note: turn].
        priority: priority of the job's ticket, higher first; 0 is usual.
        share: whether to take GPUs that are in use if too few are free.
        job_id: id of the job, which tells others who holds the devices.
        note: callback that gets a line about what the job waits for, whenever that changes, and remarks about the
            devices it gets.
        keep_waiting: function that is called between two looks; the wait ends when it returns False.
        look_every_s: time between two looks.
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.

    Yields:
        what was got; None if `keep_waiting` ended the wait.

    Raises:
        UsageError: too few GPUs are free and the job does not queue; or the queue cannot be kept.
        DsrunError: the driver does not answer.
    """
    with contextlib.ExitStack() as stack:
        if demand.ranks == 0:
            held: DeviceLease | None = DeviceLease()
        else:
            try:
                leases, tickets = (
                    ClaimFolder(folder, own=state_paths(environ).folder) for folder in claim_folders(environ)
                )
                for folder in claim_folders(environ):
                    remove_idle(folder.parent, keep=folder.name)
                stack.callback(leases.drop_all)
                stack.callback(tickets.drop_all)
                turn = _Turn(demand, environ, leases, tickets, job_id=job_id, share=share, load_nvml=load_nvml)
                if queue:
                    held = turn.wait(priority, note=note, keep_waiting=keep_waiting, look_every_s=look_every_s)
                else:
                    held = turn.take_now(note)
            except OSError as error:
                held = _unleased(error, queue=queue, note=note)
        yield held


def claim_folders(environ: Mapping[str, str], *, boot: str | None = None) -> tuple[Path, Path]:
    """Returns the folders of leases and tickets: of this machine, as a home may be shared by several.

    Args:
        environ: XDG_STATE_HOME is where they are.
        boot: id of the machine's boot, by which the folders are called; None asks the kernel for it. See [Note: one
            machine].
    """
    paths = state_paths(environ)
    name = safe_name(boot or (read_text(Path("/proc/sys/kernel/random/boot_id")) or "").strip() or socket.gethostname())
    return paths.leases(name), paths.queue(name)


def older_leases(environ: Mapping[str, str]) -> ClaimFolder | None:
    """Returns the leases of jobs of an earlier version; None where it left no folder. See [Note: one machine]."""
    path = state_paths(environ).leases(safe_name(socket.gethostname()))
    return ClaimFolder(path) if path.is_dir() and path != claim_folders(environ)[0] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What the job could have now.

    Attributes:
        taken: names of the devices to lease; empty if too few are free.
        held: value that says what the ranks see with the taken devices, and their labels.
        obstacles: holder in words -> labels of the devices that it holds, among those that the job may choose from.
        names: everything it may choose from.
        desktops: lines for the user about taken GPUs that draw a desktop too.
    """

    taken: tuple[str, ...]
    held: DeviceLease
    obstacles: dict[str, list[str]]
    names: tuple[str, ...]
    desktops: tuple[str, ...] = ()


class _Turn:
    """One job's way to its leases."""

    def __init__(
        self,
        demand: Demand,
        environ: Mapping[str, str],
        leases: ClaimFolder,
        tickets: ClaimFolder,
        *,
        job_id: str,
        share: bool,
        load_nvml: Callable[[], Any] | None,
    ) -> None:
        self._demand = demand
        self._environ = environ
        self._leases = leases
        self._tickets = tickets
        self._job_id = job_id
        self._share = share
        self._load_nvml = load_nvml
        self._older = older_leases(environ)

    def take_now(self, note: Callable[[str], None]) -> DeviceLease:
        """Takes what is free, or says why that is too little."""
        devices = self._read_devices()
        with self._leases.deciding():
            offer = self._offer(devices, partly=True)
            self._lease(offer)
        if self._demand.gpus and not offer.taken:
            raise _refusal(self._demand, offer)
        for text in offer.desktops:
            note(text)
        return offer.held

    def wait(
        self, priority: int, *, note: Callable[[str], None], keep_waiting: Callable[[], bool], look_every_s: float
    ) -> DeviceLease | None:
        """Takes a ticket and what is free when its turn has come; None if the wait was ended."""
        with driver_open(self._load_nvml) if self._demand.gpus else contextlib.nullcontext():
            return self._wait(priority, note, keep_waiting, look_every_s)

    def _wait(
        self, priority: int, note: Callable[[str], None], keep_waiting: Callable[[], bool], look_every_s: float
    ) -> DeviceLease | None:
        said = ""
        number: int | None = None
        while True:
            # Before the decision: waking a driver can take a second, in which others would stand still.
            devices = self._read_devices()
            with self._leases.deciding():
                offer = self._offer(devices, partly=False)
                others = self._tickets.others(clean=True)
                if number is None:
                    number = 1 + max((whole(one, "number") for one in others), default=0)
                    self._take_ticket(offer, number, priority)
                ahead = _ahead(others, number=number, priority=priority, names=offer.names)
                if offer.taken and not ahead:
                    self._lease(offer)
                    self._tickets.drop_all()
                    for text in offer.desktops:
                        note(text)
                    return offer.held
            text = _waiting_text(self._demand, offer.obstacles, ahead)
            if text != said:
                note(text)
                said = text
            if not keep_waiting():
                return None
            time.sleep(look_every_s)

    def _read_devices(self) -> tuple[Device, ...]:
        if not self._demand.gpus:
            return ()
        devices = read_devices(self._environ, load_nvml=self._load_nvml)
        needed = max((place + 1 for place in self._demand.chosen or ()), default=self._demand.gpus)
        if len(devices) < needed:
            raise DsrunError(f"{_gpus(needed)} are asked for and the driver shows {len(devices)} now")
        return devices

    def _offer(self, devices: Sequence[Device], *, partly: bool) -> _Offer:
        older = [] if self._older is None else self._older.others()
        leased = _holders([*self._leases.others(clean=True), *older])
        if not self._demand.gpus:
            return _offer_slots(self._demand.ranks, leased, partly=partly)
        chosen = self._demand.chosen
        eligible = devices if chosen is None else tuple(devices[place] for place in chosen)
        taken, obstacles = take_devices(eligible, self._demand.gpus, leased=leased, share=self._share)
        return _Offer(
            taken=tuple(device.name for device in taken),
            held=held_devices(taken, devices, ranks=self._demand.ranks),
            obstacles=obstacles,
            names=tuple(device.name for device in eligible),
            desktops=tuple(
                f"{device.label} draws a desktop too, which has {format_bytes(device.desktop_bytes)} of its memory"
                for device in taken
                if device.desktop_bytes > UNSEEN_BYTES
            ),
        )

    def _lease(self, offer: _Offer) -> None:
        labels = offer.held.labels
        for name, label in zip(offer.taken, labels, strict=True):
            # One file a holder: devices that are shared have several.
            self._leases.claim(f"{name}.{self._job_id}", self._content(device=name, label=label))

    def _take_ticket(self, offer: _Offer, number: int, priority: int) -> None:
        wanted = _wanted(self._demand)
        more = {"number": number, "priority": priority, "wants": wanted, "names": list(offer.names)}
        self._tickets.claim(self._job_id, self._content(**more))

    def _content(self, **more: Any) -> dict[str, Any]:
        return {"job_id": self._job_id, "pid": os.getpid(), "since_s": time.time(), **more}


def _offer_slots(ranks: int, leased: Mapping[str, str], *, partly: bool) -> _Offer:
    """Slots for a job on the CPU: one a rank; a job that queues waits for all it needs, at most all there are."""
    # By CPU: jobs of a scheduler, each with cores of its own, do not stand in each other's way.
    cpus = sorted(os.sched_getaffinity(0))[: count_usable_cores()]
    labels = {f"{_SLOT}-{cpu}@{socket.gethostname()}": f"{_SLOT}-{cpu}" for cpu in cpus}
    names = tuple(labels)
    free = [name for name in names if name not in leased]
    taken = free[:ranks]
    if not partly and len(taken) < min(ranks, len(names)):
        taken = []
    obstacles: dict[str, list[str]] = {}
    for name in names:
        if name in leased:
            obstacles.setdefault(leased[name], []).append(labels[name])
    held = DeviceLease(labels=tuple(labels[name] for name in taken))
    return _Offer(taken=tuple(taken), held=held, obstacles=obstacles, names=names)


def _holders(claims: Sequence[Claim]) -> dict[str, str]:
    """Returns name of a device -> who holds it, in words."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        content = claim.content
        found.setdefault(str(content.get("device", claim.name)), []).append(
            f"job {content.get('job_id', '?')} (pid {content.get('pid', '?')})"
        )
    return {name: " and ".join(holders) for name, holders in found.items()}


def _ahead(tickets: Sequence[Claim], *, number: int, priority: int, names: Sequence[str]) -> list[str]:
    """Returns the jobs whose tickets come first and want any of the same devices. See [Note: turn]."""
    return [
        str(one.content.get("job_id", one.name))
        for one in tickets
        if place(one) < (-priority, number) and not set(names).isdisjoint(one.content.get("names", []))
    ]


def place(ticket: Claim) -> tuple[int, int]:
    """Returns what tickets are served by, the smallest first."""
    return -whole(ticket, "priority"), whole(ticket, "number")


def whole(claim: Claim, key: str) -> int:
    """Returns a number that a claim holds; 0 where it holds none, as another version may have written it."""
    value = claim.content.get(key)
    return value if isinstance(value, int) else 0


def _refusal(demand: Demand, offer: _Offer) -> UsageError:
    count = demand.gpus
    free = len(offer.names) - sum(map(len, offer.obstacles.values()))
    are, is_free = (
        ("is" if count == 1 else "are"),
        ("none is" if not free else f"{free} {'is' if free == 1 else 'are'}"),
    )
    fewer = f", `-n {free}` takes what is free" if free and demand.chosen is None else ""
    return UsageError(
        f"{_gpus(count)} {are} asked for and {is_free} free: {_in_words(offer.obstacles)}",
        hint=f"`--queue` waits, `--share-gpus` takes them all the same{fewer}, `--backend gloo` needs none",
    )


def _waiting_text(demand: Demand, obstacles: Mapping[str, list[str]], ahead: Sequence[str]) -> str:
    reasons = [_in_words(obstacles)] if obstacles else []
    if ahead:
        reasons.append(f"{len(ahead)} job{'s' if len(ahead) > 1 else ''} ahead")
    return f"waiting for {_wanted(demand)}: {'; '.join(reasons)}"


def _in_words(obstacles: Mapping[str, list[str]]) -> str:
    return ", ".join(
        f"{together(labels)} {'is' if len(labels) == 1 else 'are'} held by {holder}"
        for holder, labels in obstacles.items()
    )


def together(labels: Sequence[str]) -> str:
    """Names a few devices, and counts slots and many."""
    if len(labels) == 1:
        return labels[0]
    if labels[0].startswith(_SLOT + "-"):
        return f"{len(labels)} slots"
    kind, _, first = labels[0].partition(" ")
    if kind == "GPU" and all(label.startswith("GPU ") for label in labels):
        return f"GPUs {first}, {', '.join(label[4:] for label in labels[1:])}"
    return ", ".join(labels)


def _wanted(demand: Demand) -> str:
    return _gpus(demand.gpus) if demand.gpus else f"{demand.ranks} slot{'s' if demand.ranks > 1 else ''}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _unleased(error: OSError, *, queue: bool, note: Callable[[str], None]) -> DeviceLease:
    # One of another user's folder names it.
    reason = f"{error.filename or 'leases'}: {error.strerror.lower()}" if error.strerror else str(error)
    if queue:
        raise UsageError(f"the queue cannot be kept: {reason}", hint="name another place in XDG_STATE_HOME") from error
    note(f"devices are not leased, another job may take them too: {reason}")
    return DeviceLease()
