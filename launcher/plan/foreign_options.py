"""What users of other launchers type by habit: other spellings of our options, and words of theirs.

A spelling that means exactly the same is taken as ours. Every other option of theirs is refused, with what dsrun has in
its place: one that is taken and means something else would cost more than one that is refused.

Their parsers take `_` for `-`, so both tables have `-` alone. mpirun's options of one dash and several letters are
letters to click: it reads `-np 2` as `-n p`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Their spelling -> ours, without dashes in front, where both say the same.
SPELLINGS = {
    "num-gpus": "ranks-per-host",
    "num-accelerators": "ranks-per-host",
    "num-nodes": "nodes",
    "node-rank": "node-rank",
    "machine-rank": "node-rank",
    "master-addr": "master-addr",
    "main-process-ip": "master-addr",
    "master-port": "master-port",
    "main-process-port": "master-port",
    "ssh-port": "ssh-port",
    "no-python": "no-python",
    "max-restarts": "max-restarts",
    "log-dir": "log-dir",
}

_RENDEZVOUS = "leave it out: dsrun makes the ranks meet by itself; `--iface NAME` chooses the network"
_RANKS = "`-n N` is the number of ranks on each host"
_NODES = "`-H FILE` names the hosts, and `--nodes N` takes the first N"
_BIND = "`--bind numa` or `--bind cores` binds ranks"
_EVERY_LOG = "leave it out: the output of every rank is kept; `dsrun logs` shows it, `--log-dir DIR` says where"
_HOSTS = "`-H FILE` names the hosts, a line each, `w0:2` or `w0 slots=2`; `-H -` reads them from stdin"
_CONFIG = "`--config FILE` names the config that says so"

#: Their option -> what to do instead.
INSTEAD = {
    # DeepSpeed
    "--launcher": "`--transport ssh`, `openssh` or `srun` is the way to the hosts",
    "--launcher-args": "what ssh needs stands in ssh_config; `--ssh-config FILE` names another",
    "--no-ssh": "leave it out: `--nodes N --node-rank R --master-addr A --master-port P` starts this machine's alone",
    "--no-ssh-check": "`--no-preflight` skips the checks of hosts",
    "--force-multi": "leave it out: a hostfile of one host is obeyed as any other",
    "--bind-cores-to-rank": "`--bind cores` gives each rank cores of its own",
    "--bind-core-list": "`taskset` or a cpuset limits what dsrun uses; `--bind cores` shares that out",
    "--no-local-rank": "leave it out: no word is added to the script's; it finds LOCAL_RANK in its environment",
    "--save-pid": "`dsrun ps` lists jobs, and `dsrun show JOB` their processes",
    "--enable-each-rank-log": _EVERY_LOG,
    "--autotuning": "`dsrun plan --fit MODEL` prints the fastest config that fits",
    "--elastic-training": "`--max-restarts N` starts again from the newest checkpoint",
    "--min-elastic-nodes": "`--max-restarts N` starts again from the newest checkpoint",
    "--max-elastic-nodes": "`--max-restarts N` starts again from the newest checkpoint",
    "--venv-script": "`python=PATH` in the hostfile names a host's interpreter",
    "--log-level": "`--quiet` leaves dsrun's notes away",
    "--python": "`python=PATH` in the hostfile names a host's interpreter; here it is the one that runs dsrun",
    "--deepspeed": "it is the script's: put it after the script; `--config FILE` names the training config",
    "--deepspeed-config": "`--config FILE` names the training config",
    # torchrun
    "--nproc-per-node": _RANKS,
    "--nnodes": _NODES,
    "--nproc": _RANKS,
    "--world-size": f"{_RANKS}, not in total",
    "--use-env": "leave it out: a rank finds LOCAL_RANK in its environment",
    "--standalone": "leave it out: without `-H` a job runs on this machine",
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), _RENDEZVOUS),
    "--local-addr": _RENDEZVOUS,
    "--redirects": _EVERY_LOG,
    "-r": _EVERY_LOG,
    "--tee": _EVERY_LOG,
    "-t": _EVERY_LOG,
    "--local-ranks-filter": "`--ranks 0,8-11` shows these ranks only",
    "--log-line-prefix-template": "leave it out: lines come tagged `[rank]`",
    "--numa-binding": _BIND,
    "--start-method": "`--start fork` or `--start exec` says how ranks are made",
    "--monitor-interval": "leave it out: dsrun waits for the ends of processes, and does not poll",
    "--shutdown-timeout": "`--grace TIME` is for ranks to end, when stopped",
    "--role": "leave it out",
    "--run-path": "leave it out: `dsrun SCRIPT` runs a file",
    "--virtual-local-rank": "leave it out: LOCAL_RANK is the rank's number on its host",
    # accelerate
    "--num-processes": f"{_RANKS}, not in total",
    "--num-machines": _NODES,
    "--same-network": _RENDEZVOUS,
    "--mpirun-hostfile": "`-H FILE` reads MPI's `host:4` too",
    "--deepspeed-hostfile": "`-H FILE` names the hosts",
    "--deepspeed-inclusion-filter": "`--include FILTER` takes hosts and slots",
    "--deepspeed-exclusion-filter": "`--exclude FILTER` leaves hosts and slots",
    "--deepspeed-multinode-launcher": "`--transport ssh`, `openssh` or `srun` is the way to the hosts",
    "--deepspeed-config-file": "`--config FILE` names the training config",
    "--config-file": "`--config FILE` names the training config; dsrun reads no settings of its own from a file",
    "--gpu-ids": "`--include localhost:0,2` takes these GPUs",
    "--multi-gpu": "leave it out: a job takes all GPUs, or `-n N`",
    "--cpu": "`--no-gpu` trains on the CPU",
    "--num-cpu-threads-per-process": "`--env OMP_NUM_THREADS=N` sets the threads of a rank",
    "--enable-cpu-affinity": _BIND,
    "--mixed-precision": _CONFIG,
    "--zero-stage": _CONFIG,
    "--gradient-accumulation-steps": _CONFIG,
    "--gradient-clipping": _CONFIG,
    "--use-deepspeed": _CONFIG,
    "--use-fsdp": _CONFIG,
    # mpirun
    **dict.fromkeys(("-np", "--np", "--n"), f"{_RANKS}, not in total"),
    **dict.fromkeys(("-npernode", "--npernode", "-ppn", "--ppn", "-perhost"), _RANKS),
    **dict.fromkeys(("-map-by", "--map-by", "-rank-by", "--rank-by"), f"{_RANKS}; the first host has the first ranks"),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile", "-f"), "`-H FILE` reads MPI's `host:4` too"),
    **dict.fromkeys(("-host", "--host", "-hosts", "--hosts"), _HOSTS),
    **dict.fromkeys(
        ("-x", "-genv", "-genvlist", "--genv"), "`--env NAME=VALUE` sets a variable, `--env NAME` copies it"
    ),
    **dict.fromkeys(("-wdir", "--wdir", "-wd", "--wd", "--cwd"), "`--workdir DIR` is where ranks start"),
    **dict.fromkeys(("-mca", "--mca", "--mpi"), "leave it out: dsrun uses no MPI; `--iface NAME` chooses the network"),
    **dict.fromkeys(("-bind-to", "--bind-to"), _BIND),
    **dict.fromkeys(("-oversubscribe", "--oversubscribe"), "leave it out: on the CPU `-n N` may exceed the cores"),
    **dict.fromkeys(("-tag-output", "--tag-output"), "leave it out: lines come tagged `[rank]`"),
    **dict.fromkeys(("-output-filename", "--output-filename"), _EVERY_LOG),
    **dict.fromkeys(("-report-bindings", "--report-bindings"), "`dsrun --dry-run` shows the cores of ranks"),
    "--display-map": "`dsrun --dry-run` shows which rank runs where",
    "--allow-run-as-root": "leave it out: ranks run as whoever starts dsrun",
    "--timeout": "`--hang-timeout TIME` is for a job without progress; `timeout 2h dsrun ...` ends any",
    # srun and sbatch
    "--ntasks": f"{_RANKS}, not in total",
    "-N": f"{_NODES}; {_RANKS}",
    **dict.fromkeys(
        ("--gpus", "--gpu", "--ngpus", "-G"), f"{_RANKS}, one on each GPU; `--include localhost:0,2` chooses GPUs"
    ),
    **dict.fromkeys(("--ntasks-per-node", "--gpus-per-node"), _RANKS),
    "--gpus-per-task": "leave it out: each rank has a GPU of its own",
    "--gres": f"{_RANKS}; Slurm's own words stand behind `--`: `dsrun slurm train.py -- --gres=gpu:8`",
    "--cpus-per-task": f"leave it out: ranks share the cores of their host; {_BIND}",
    **dict.fromkeys(("--chdir", "-D"), "`--workdir DIR` is where ranks start"),
}


#: What other tools call what a verb of ours does.
VERBS_INSTEAD = {
    **dict.fromkeys(("list", "ls", "jobs", "status", "squeue"), "ps"),
    **dict.fromkeys(("kill", "cancel", "scancel", "terminate"), "stop"),
    **dict.fromkeys(("tail", "output"), "logs"),
    **dict.fromkeys(("restart", "resume", "retry"), "rerun"),
    **dict.fromkeys(("info", "describe", "inspect"), "show"),
    **dict.fromkeys(("remove", "delete", "clean", "prune"), "rm"),
    **dict.fromkeys(("launch", "start", "exec"), "run"),
    **dict.fromkeys(("submit", "sbatch"), "slurm"),
    **dict.fromkeys(("monitor", "dashboard"), "watch"),
    **dict.fromkeys(("hardware", "gpus", "topo"), "probe"),
    "help": "--help",
    "version": "--version",
}


def our_spelling(word: str) -> str:
    """Returns our spelling of an option where another launcher's means the same; any other word as it is.

    Args:
        word: an option without its dashes, as click gives it.
    """
    return SPELLINGS.get(word.replace("_", "-"), word)


def instead_of(option: str) -> str | None:
    """Returns what to do instead of an option of another launcher; None of any other.

    Args:
        option: option as it was typed, with its dashes.
    """
    return INSTEAD.get(option.replace("_", "-"))


def read_as_letters(words: Sequence[str], letter: str) -> str | None:
    """Returns the option of another launcher, like `-np`, that click has read letter by letter; None if none was.

    Args:
        words: words of the command line.
        letter: the one that click stumbled over.
    """
    groups = (word.partition("=")[0] for word in words if re.match(r"-[A-Za-z]", word))
    first = next((group for group in groups if letter in group), "")
    return first if len(first) > 2 and instead_of(first) is not None else None
