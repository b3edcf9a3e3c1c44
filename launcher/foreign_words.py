"""What users of DeepSpeed, torchrun and accelerate type by habit: other spellings of our options, and words of theirs.

A spelling that means exactly the same is taken as ours. Every other option of theirs is refused, with what dsrun has in
its place: one that is taken and means something else would cost more than one that is refused.
"""

from __future__ import annotations

#: Their spelling -> ours, without dashes, where both say the same.
SPELLINGS = {
    "num_gpus": "ranks-per-host",
    "num_accelerators": "ranks-per-host",
    "num_nodes": "nodes",
    "node_rank": "node-rank",
    "machine_rank": "node-rank",
    "master_addr": "master-addr",
    "main_process_ip": "master-addr",
    "master_port": "master-port",
    "main_process_port": "master-port",
    "ssh_port": "ssh-port",
    "no_python": "no-python",
    "max_restarts": "max-restarts",
    "log_dir": "log-dir",
}

_RENDEZVOUS = "leave it out: dsrun makes the ranks meet by itself; `--iface NAME` chooses the network"
_RANKS = "`-n N` is the number of ranks on each host"
_EVERY_LOG = "leave it out: the output of every rank is kept; `dsrun logs` shows it, `--log-dir DIR` says where"
_CONFIG = "`--config FILE` names the config that says so"

#: Their option -> what to do instead.
INSTEAD = {
    # DeepSpeed
    "--launcher": "`--transport ssh`, `openssh` or `srun` is the way to the hosts",
    "--launcher_args": "what ssh needs stands in ssh_config; `--ssh-config FILE` names another",
    "--no_ssh": "leave it out: `--nodes N --node-rank R --master-addr A --master-port P` starts this machine's alone",
    "--no_ssh_check": "`--no-preflight` skips the checks of hosts",
    "--force_multi": "leave it out: a hostfile of one host is obeyed as any other",
    "--bind_cores_to_rank": "`--bind cores` gives each rank cores of its own",
    "--bind_core_list": "`taskset` or a cpuset limits what dsrun uses; `--bind cores` shares that out",
    "--no_local_rank": "leave it out: no word is added to the script's; it finds LOCAL_RANK in its environment",
    "--save_pid": "`dsrun ps` lists jobs, and `dsrun show JOB` their processes",
    "--enable_each_rank_log": _EVERY_LOG,
    "--autotuning": "`dsrun plan --fit MODEL` prints the fastest config that fits",
    "--elastic_training": "`--max-restarts N` starts again from the newest checkpoint",
    "--min_elastic_nodes": "`--max-restarts N` starts again from the newest checkpoint",
    "--max_elastic_nodes": "`--max-restarts N` starts again from the newest checkpoint",
    "--venv_script": "`python=PATH` in the hostfile names a host's interpreter",
    "--log_level": "`--quiet` leaves dsrun's notes away",
    # torchrun
    "--nproc-per-node": _RANKS,
    "--nproc_per_node": _RANKS,
    "--nnodes": "`-H FILE` names the hosts, and `--nodes N` takes the first N",
    "--standalone": "leave it out: without `-H` a job runs on this machine",
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), _RENDEZVOUS),
    **dict.fromkeys(("--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf"), _RENDEZVOUS),
    "--local-addr": _RENDEZVOUS,
    "--redirects": _EVERY_LOG,
    "-r": _EVERY_LOG,
    "--tee": _EVERY_LOG,
    "-t": _EVERY_LOG,
    "--local-ranks-filter": "`--ranks 0,8-11` shows these ranks only",
    "--log-line-prefix-template": "leave it out: lines come tagged `[rank]`",
    "--numa-binding": "`--bind numa` or `--bind cores` binds ranks",
    "--start-method": "`--start fork` or `--start exec` says how ranks are made",
    "--monitor-interval": "leave it out: dsrun waits for the ends of processes, and does not poll",
    "--shutdown-timeout": "`--grace TIME` is for ranks to end, when stopped",
    "--role": "leave it out",
    "--run-path": "leave it out: `dsrun SCRIPT` runs a file",
    "--virtual-local-rank": "leave it out: LOCAL_RANK is the rank's number on its host",
    # accelerate
    "--num_processes": f"{_RANKS}, not in total",
    "--num_machines": "`-H FILE` names the hosts, and `--nodes N` takes the first N",
    "--same_network": _RENDEZVOUS,
    "--mpirun_hostfile": "`-H FILE` reads MPI's `host:4` too",
    "--deepspeed_hostfile": "`-H FILE` names the hosts",
    "--deepspeed_inclusion_filter": "`--include FILTER` takes hosts and slots",
    "--deepspeed_exclusion_filter": "`--exclude FILTER` leaves hosts and slots",
    "--deepspeed_multinode_launcher": "`--transport ssh`, `openssh` or `srun` is the way to the hosts",
    "--deepspeed_config_file": "`--config FILE` names the training config",
    "--config_file": "`--config FILE` names the training config; dsrun reads no settings of its own from a file",
    "--gpu_ids": "`--include localhost:0,2` takes these GPUs",
    "--multi_gpu": "leave it out: a job takes all GPUs, or `-n N`",
    "--cpu": "`--no-gpu` trains on the CPU",
    "--num_cpu_threads_per_process": "`--env OMP_NUM_THREADS=N` sets the threads of a rank",
    "--enable_cpu_affinity": "`--bind numa` or `--bind cores` binds ranks",
    "--mixed_precision": _CONFIG,
    "--zero_stage": _CONFIG,
    "--gradient_accumulation_steps": _CONFIG,
    "--gradient_clipping": _CONFIG,
    "--use_deepspeed": _CONFIG,
    "--use_fsdp": _CONFIG,
}


def our_spelling(word: str) -> str:
    """Returns our spelling of an option where another launcher's means the same; any other word as it is.

    Args:
        word: an option without its dashes, as click gives it.
    """
    return SPELLINGS.get(word, word)
