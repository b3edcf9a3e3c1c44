"""Many jobs, each killed at a random moment, and many that end by themselves: what is left over, and what exits wrong.

    bash scripts/soak                       # 100 launches, killed 0 to 5 s after their start
    bash scripts/soak --launches 20 --seed 7
    bash scripts/soak --saves 400           # checkpoints being saved, in and beside training, under new and old names
    bash scripts/soak --client-saves 17     # Hugging Face's Trainer, killed in its saves three times each
    bash scripts/soak --axes 24             # one rank of 8 on three axes that stalls, dies or raises: who is blamed
    bash scripts/soak --large 5             # one save of 5 GiB in one file, checked and loaded, on the disk of $TMPDIR
    bash scripts/soak --exits 100           # clean runs of two ranks with an engine, which must all end with 0
    bash scripts/soak --hosts 2             # launches over two hosts of namespaces, by ssh; needs root
    bash scripts/soak --hosts 2 --exits 20  # clean runs over them, on bad networks in turn

In turn the front end is killed by SIGKILL, SIGTERM and SIGINT, then its agent, its spawner, and a rank; over hosts one
of theirs, the process that answers before a job, and the ssh connections. Started by fork and by exec in turn.
Networks are good, lose 5 % or 30 % of all packets, carry 1 Mbit/s, or take 200 ms to a host; on each of them losses
must be the same to the last bit, and no job may be taken for one that hangs.
After each, the oracle of the fault matrix: see [Note: oracle] in tests/support/faults.py. Prints a line for each
failure, with what repeats it, and a summary. Exits with 1 if there was any failure.
"""

from __future__ import annotations

import argparse
import collections
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import axis_faults, clients, killed_clients
from support.bad_networks import NETWORKS, network
from support.faults import launched
from support.faults_training import TRAIN, losses_said, true_losses
from support.killed_saves import kill_while_saving
from support.large_save import save_and_load
from support.many_hosts import launched_on_hosts
from support.namespaces import Rig, hosts, why_no_hosts
from support.random_kills import VICTIMS, VICTIMS_ON_HOSTS, kill_at, kill_on_hosts_at

LATEST_MOMENT_S = 5.0
#: Over hosts there is more before the ranks.
LATEST_MOMENT_ON_HOSTS_S = 10.0
#: What answers before a job is there for about a second.
LATEST_SURVEYOR_S = 1.5


def kill_one(folder: Path, number: int, seed: int) -> str:
    """Launches a job and kills it; returns what was killed."""
    chance = random.Random(f"{seed} {number}")
    victim = VICTIMS[number % len(VICTIMS)]
    start = ("fork", "exec")[number // len(VICTIMS) % 2]
    return "killed: " + kill_at(folder, victim, moment_s=chance.uniform(0.0, LATEST_MOMENT_S), start=start)


def kill_one_on_hosts(rig: Rig, folder: Path, number: int, seed: int) -> str:
    """Launches a job over hosts and kills it; returns what was killed."""
    chance = random.Random(f"{seed} {number}")
    victim = VICTIMS_ON_HOSTS[number % len(VICTIMS_ON_HOSTS)]
    start = ("fork", "exec")[number // len(VICTIMS_ON_HOSTS) % 2]
    moment_s = chance.uniform(0.0, LATEST_SURVEYOR_S if victim == "surveyor" else LATEST_MOMENT_ON_HOSTS_S)
    return "killed: " + kill_on_hosts_at(
        rig, folder, victim, host=chance.choice(rig.hosts), moment_s=moment_s, start=start
    )


def kill_one_save(folder: Path, number: int, seed: int) -> str:
    """Kills a process that saves checkpoints; returns what was killed."""
    return kill_while_saving(
        folder / "checkpoints", seed=f"{seed} {number}", repeated=number % 2 == 1, asynchronous=number % 4 < 2
    )


def kill_trainer(folder: Path, number: int, seed: int) -> str:
    """Kills Hugging Face's Trainer in its saves, and compares it with one that nothing has stopped."""
    return killed_clients.kill_at_random(folder, seed=f"{seed} {number}")


def fault_on_axes(folder: Path, number: int, seed: int) -> str:
    """Stalls, kills or makes raise one rank of a job on three axes, each fault at each place in turn."""
    place = tuple(axis_faults.PLACES)[number % len(axis_faults.PLACES)]
    how = axis_faults.HOW[number // len(axis_faults.PLACES) % len(axis_faults.HOW)]
    rank = random.Random(f"{seed} {number}").randrange(axis_faults.RANKS)
    axis_faults.Fault(how, place, rank).run(folder)
    return f"on three axes: {how}, {place}"


def save_large(gib: float, folder: Path, number: int, seed: int) -> str:
    """Saves and loads one large checkpoint."""
    return save_and_load(folder / "checkpoints", gib)


def exit_once(folder: Path, number: int, seed: int) -> str:
    """Trains two ranks to their end."""
    with launched(folder, TRAIN.replace("CRASH", "pass"), "-n", "2", words=[str(folder / "checkpoints")]) as job:
        ended = job.end()
    assert ended.exit_code == 0, f"exit code {ended.exit_code}\n{ended.text}"
    return "ended by themselves"


class ExitsOnHosts:
    """Trains two ranks on two hosts to their end, on one network after the other.

    Args:
        rig: the hosts.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        #: Of the first run; all others must have the same.
        self._losses: dict[int, list[float]] = {}

    def __call__(self, folder: Path, number: int, seed: int) -> str:
        """Trains once; returns on which network."""
        name = NETWORKS[number % len(NETWORKS)]
        words = ("--nodes", "2", "--connect-timeout", "100s", "--hang-timeout", "60s", "--on-hang", "stop")
        program = TRAIN.replace("CRASH", "pass")
        with (
            network(name, self._rig, folder) as (listed, config),
            launched_on_hosts(self._rig, folder, program, *words, hosts=listed, ssh_config=config, words=["-"]) as job,
        ):
            ended = job.end()
        assert ended.exit_code == 0, f"{name}: exit code {ended.exit_code}\n{ended.text}"
        losses = losses_said(ended.out)
        true = true_losses()
        assert all(abs(losses[step][0] - loss) < 1e-6 for step, (loss,) in true.items()), f"{name}: {losses} {true}"
        self._losses = self._losses or losses
        assert losses == self._losses, f"{name}: {losses}, and on the first network {self._losses}"
        return f"ended by themselves, network: {name}"


def repeat(
    count: int,
    one: Callable[[Path, int, int], str],
    *,
    seed: int,
    only: int | None,
    below: Path | None = None,
) -> int:
    """Runs `one` so often, each time in a folder of its own; returns how many failed.

    Args:
        count: number of jobs to run.
        one: a job; raises AssertionError if it fails.
        seed: seed of the random choices of the jobs, such as the moment of a kill.
        only: the number of the one job to run.
        below: folder in which the folders of the jobs are made; None for the usual place of temporary folders.
    """
    kinds: collections.Counter[str] = collections.Counter()
    failures = 0
    began_s = time.monotonic()
    for number in range(count) if only is None else [only]:
        folder = Path(tempfile.mkdtemp(prefix="soak-", dir=below))
        try:
            kinds[one(folder, number, seed)] += 1
        except AssertionError as failure:
            failures += 1
            print(f"FAILED number {number} of seed {seed}, kept {folder}: {failure}", flush=True)
        else:
            shutil.rmtree(folder)
    print(f"{sum(kinds.values()) + failures} jobs, seed {seed}, {time.monotonic() - began_s:.0f} s: {failures} failed")
    for kind, times in sorted(kinds.items()):
        print(f"  {times:4d} {kind}")
    return failures


def repeat_on_hosts(launches: int, exits: int, host_count: int, *, seed: int, only: int | None) -> int:
    """Kills so many jobs over so many hosts, and lets so many end by themselves; returns how many failed."""
    folder = Path(tempfile.mkdtemp(prefix="soak-hosts-"))
    failures = 0
    with hosts(host_count, folder) as rig:
        if launches:
            failures += repeat(launches, partial(kill_one_on_hosts, rig), seed=seed, only=only, below=folder)
        if exits:
            failures += repeat(exits, ExitsOnHosts(rig), seed=seed, only=only, below=folder)
    if not failures:
        shutil.rmtree(folder)
    return failures


def main() -> int:
    """Reads the words; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, help="jobs to kill (default: 100, if nothing else is asked for)")
    parser.add_argument("--saves", type=int, default=0, help="savers of checkpoints to kill")
    parser.add_argument("--client-saves", type=int, default=0, help="runs of Hugging Face's Trainer to kill in saves")
    parser.add_argument("--axes", type=int, default=0, help="jobs on three axes with a fault of one rank")
    parser.add_argument("--large", type=float, metavar="GIB", help="save and load one checkpoint of so many GiB")
    parser.add_argument("--exits", type=int, default=0, help="jobs to let end by themselves")
    parser.add_argument("--hosts", type=int, metavar="N", help="all of it over N hosts of namespaces, at least 2")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="(default: another each time)")
    parser.add_argument("--only", type=int, metavar="N", help="repeat number N of that seed alone")
    args = parser.parse_args()
    others = args.exits or args.saves or args.client_saves or args.axes or args.large
    launches = args.launches if args.launches is not None else 0 if others else 100
    if args.hosts is not None and args.hosts < 2:
        parser.error("--hosts takes 2 or more")
    if args.hosts and (reason := why_no_hosts()) is not None:
        parser.error(reason)
    if args.client_saves and (reason := clients.why_none("transformers", "accelerate", "datasets")) is not None:
        parser.error(reason)
    failures = 0
    if args.saves:
        failures += repeat(args.saves, kill_one_save, seed=args.seed, only=args.only)
    if args.client_saves:
        failures += repeat(args.client_saves, kill_trainer, seed=args.seed, only=args.only)
    if args.axes:
        failures += repeat(args.axes, fault_on_axes, seed=args.seed, only=args.only)
    if args.large:
        failures += repeat(1, partial(save_large, args.large), seed=args.seed, only=None)
    if args.hosts:
        failures += repeat_on_hosts(launches, args.exits, args.hosts, seed=args.seed, only=args.only)
    else:
        failures += repeat(launches, kill_one, seed=args.seed, only=args.only) if launches else 0
        failures += repeat(args.exits, exit_once, seed=args.seed, only=args.only) if args.exits else 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
