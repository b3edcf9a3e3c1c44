from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.contract.profile_request import ProfileRequest, profile_request
from dsrun.launcher.cli import VERBS
from dsrun.launcher.plan.environment import passed_on
from support.cli import Result, clean_environment, invoke
from support.core_speed import program_core_seconds

HELP = """\
Usage: dsrun [OPTIONS] SCRIPT [ARGS]...
       dsrun VERB ...

  Start and run distributed PyTorch training.

    dsrun train.py --config ds.json      a rank on every GPU of this machine
    dsrun -n 2 train.py --lr 3e-4        two ranks; options of dsrun stand
                                         before the script
    dsrun probe                          what hardware there is

  `dsrun run --help` lists the options of a run.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Verbs:
  run         Start a script on every rank (the verb may be left out).
  ps          List jobs that run or wait, and those of the last day.
  logs        Print what the ranks of a job wrote.
  attach      Follow a job to its end.
  top         Show how the ranks of running jobs fare.
  watch       Watch a job train: loss, speed, memory, slow ranks.
  metrics     Serve figures of jobs to Prometheus.
  stop        End jobs.
  show        Show everything about a job.
  export      Give a job's records to trackers.
  memory      Show what a job's memory was used for.
  report      Write a page with plots of jobs, for a browser.
  trace       Merge the profiles of a job's ranks, and sum them up.
  rerun       Run a job's command again, and say what changed.
  rm          Remove jobs that have ended.
  queue       List jobs that hold or wait for devices.
  probe       Show host, processor, memory, GPUs and versions.
  nvme        Find the fastest settings for disks that offload uses.
  config      Check training configs.
  checkpoint  List, check, compare, convert and remove checkpoints.
  slurm       Submit a run to Slurm, on nodes that it chooses.
  k8s         Print a run as a Kubernetes JobSet.
  plan        Predict memory and the shortest step before anything runs.
  doctor      Check whether this machine is fit for jobs.
  completion  Print the script for completion in a shell.
"""

RUN_HELP = """\
Usage: dsrun run [OPTIONS] SCRIPT [ARGS]...

  Start SCRIPT on every rank and stay until the last one has ended.

  SCRIPT may be any program. Words after it are its own, but for `--config
  FILE`, which is checked first and given to ranks as DSRUN_CONFIG; with `--`
  before SCRIPT there is no exception.

  With `--as-deepspeed`, scripts written for DeepSpeed run as they are: SCRIPT
  and all that it starts find dsrun under that name, whether DeepSpeed is
  installed or not.

  Lines come tagged `[rank]`: stdout on stdout, stderr on stderr. `dsrun logs`
  has all of them again.

Where:
  -n, --ranks-per-host N  Ranks on each host.  [default: its GPUs, or 1]
  -H, --hostfile FILE     Hosts, one `host slots=N` a line; - is stdin.
  -i, --include FILTER    Take only these: `w0@w1:0,2`, `w[0-3]:0-1`.
  -e, --exclude FILTER    Take all but these.
  --nodes N               Take the first N hosts.
  --bind HOW              Cores of a rank: auto, none, cores or numa.
  --queue                 Wait for free GPUs or slots; see `dsrun queue`.
  --priority N            Place in the queue; higher is earlier.
  --share-gpus            Take GPUs in use if too few are free.

What:
  -m, --module            SCRIPT is a module, as for `python -m`.
  --no-python             SCRIPT is any program, run as it is.
  --as-deepspeed          `import deepspeed` gives dsrun; all words after
                          SCRIPT are its own.
  --config FILE           Training config; checked first.
  --backend [nccl|gloo]   How ranks talk.  [default: up to SCRIPT]
  --no-gpu                Train on the CPU: ranks see no GPU.
  --start [fork|exec]     Import torch once and fork, or start each anew.
  --env K[=V]             Set a variable for all ranks, or pass it on.
  --env-file FILE         Set those of a file, `K=V` a line.
  --model MODEL           What is trained, as for `dsrun plan`.
  --no-plan               Start also what cannot fit into memory.
  --memory-history        Name the lines of code that fill the GPU.
  --profile steps=A:B     Trace these steps; see `dsrun trace`.
  --dry-run               Check all, print the plan, start nothing.

Other hosts:
  --transport HOW         Way to the hosts: ssh, openssh (the system's
                          client), srun or local (all of them are this
                          machine).
  --ssh-config FILE       Read it in place of ~/.ssh/config.
  --accept-new-host-keys  Trust hosts that known_hosts has not, and note them.
  --connect-timeout TIME  For a host to answer.  [default: 8s]
  --start-timeout TIME    Then for dsrun to start.  [default: 20s; srun 60s]
  --iface NAME            Meet on this network.  [default: the fastest that
                          all share]
  --sync                  Copy this folder to every host first, what has
                          changed of it.
  --workdir DIR           Working folder of all ranks.  [default: this one]
  --no-preflight          Start without comparing the hosts first.
  --node-rank R           Start the ranks of node R of `--nodes N` only.
  --master-addr ADDR      With it: where node 0 is.
  --master-port PORT      With it: a free port of node 0.

When it fails:
  --grace TIME            For ranks to end, when stopped.  [default: 10s]
  --max-restarts N        Start again, from the newest checkpoint.
  --min-uptime TIME       After a shorter try, wait longer.  [default: 60s]
  --hang-timeout TIME     No progress is a hang after it.  [default: 30m, for
                          ranks with heartbeats]
  --on-hang HOW           What then: report (who is where), stop or restart.

What you see:
  -d, --detach            Print the job's id and go on in the background.
  --log-dir DIR           Make the job's folder in DIR.
  --ranks RANKS           Show these ranks only, like `0,8-11`.
  --stdin RANK            Give stdin to this rank.  [default: to a lone one]
  --no-progress           No bars and no progress row.
  --json                  Plan, id or outcome as one object on stdout.
  -q, --quiet             No notes of dsrun itself but errors.
  -h, --help              Show this message and exit.

Exit code:
  0         every rank returned 0
  1 to 127  the first failing rank's own code (126 or 127 where a command
            could not be run)
  2         wrong arguments, config, hostfile or model; where ranks met it,
            the first one's own code
  74        a host was lost or could not run its ranks
  75        hosts could not be reached or are not fit; nothing was started
  76        ranks made no progress for `--hang-timeout`, and the job was ended
            for it
  128 + N   the first failing rank was killed by signal N: 137 SIGKILL, 139
            SIGSEGV, 134 SIGABRT
  129       stopped by SIGHUP: its terminal was closed
  130       stopped with Ctrl-C
  131       killed with Ctrl-\\
  141       stopped because nobody reads its output (`| head`)
  143       stopped by SIGTERM
"""

PROBE_HELP = """\
Usage: dsrun probe [OPTIONS]

  Show host, processor, memory, GPUs and versions, and what is not as it
  should be.

  Cores and memory are what this process may use (affinity, cgroups), not only
  what there is. Of many hosts, what all have in common is shown once and what
  differs below, the odd one out marked with `!`; the exit code is 1 if a host
  does not answer. Nothing is measured without --bench, and torch is imported
  with --deep and --bench only.

  --bench writes a file of at most 1 GiB without a name to each DIR, which is
  gone whatever happens.

Where:
  -H, --hostfile FILE     Hosts, one `host slots=N` a line; - is stdin.
  -i, --include FILTER    Take only these: `w0@w1:0,2`, `w[0-3]:0-1`.
  -e, --exclude FILTER    Take all but these.
  --nodes N               Take the first N hosts.
  --transport HOW         Way to the hosts: ssh, openssh (the system's
                          client), srun or local (all of them are this
                          machine).
  --ssh-config FILE       Read it in place of ~/.ssh/config.
  --accept-new-host-keys  Trust hosts that known_hosts has not, and note them.
  --connect-timeout TIME  For a host to answer.  [default: 8s]
  --start-timeout TIME    Then for dsrun to start.  [default: 20s; srun 60s]

What:
  -a, --all               Show also what is not looked at every day.
  --deep                  Import torch, and say what was loaded.
  --bench                 Measure memory, disk, GPUs and the network; about 10
                          s.
  --path DIR              A folder jobs use.  [default: this one]
  --watch [TIME]          Show what changes, every 2 seconds or TIME, until
                          Ctrl-C.
  --json                  One JSON object; with --watch one a line.
  -h, --help              Show this message and exit.
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script and a config, on a machine that shows no GPU."""
    (tmp_path / "train.py").write_text("raise AssertionError('started')\n")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    (tmp_path / "tool.yaml").write_text("name: mine\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("OMP_NUM_THREADS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dry(*args: str) -> Result:
    return invoke("--dry-run", "--json", *args)


def refused(*args: str) -> str:
    """Returns what a run that may not start says."""
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


# Help and verbs


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_fits_on_a_screen_and_lists_every_verb(flag: str) -> None:
    assert invoke(flag) == Result(0, HELP, "")
    assert all(verb in HELP for verb in VERBS)


def test_no_words_at_all_show_the_help_and_are_an_error() -> None:
    assert invoke() == Result(2, "", HELP)


@pytest.mark.parametrize("verb", [*VERBS, "config check"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_has_help_no_wider_than_80_columns(verb: str, flag: str) -> None:
    result = invoke(*verb.split(), flag)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: dsrun {verb} ")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_help_of_the_verbs_reads_as_reviewed() -> None:
    assert invoke("run", "--help").stdout == RUN_HELP
    assert invoke("probe", "--help").stdout == PROBE_HELP


def test_version_is_data() -> None:
    assert invoke("--version") == Result(0, "dsrun 0.2.0\n", "")


def test_a_verb_wins_over_a_file_of_its_name(folder: Path) -> None:
    (folder / "probe").write_text("")
    assert invoke("probe", "--json").exit_code == 0
    assert json.loads(dry("probe").stdout)["program"]["target"] == "probe"


@pytest.mark.parametrize(
    "args",
    [
        ["--dry-run", "--json", "-n2", "train.py", "-n", "9"],
        ["run", "--dry-run", "--json", "-n", "2", "train.py", "-n", "9"],
        ["-n", "2", "--dry-run", "--json", "train.py", "-n", "9"],
    ],
)
def test_options_before_the_script_are_dsruns_and_after_it_the_scripts(args: list[str]) -> None:
    plan = json.loads(invoke(*args).stdout)
    assert (plan["program"]["target"], plan["program"]["args"]) == ("train.py", ["-n", "9"])
    assert [len(node["workers"]) for node in plan["nodes"]] == [2]


def test_dry_run_reads_well(folder: Path) -> None:
    result = invoke(
        *("-n", "2", "--bind", "none", "--dry-run", "--log-dir", "logs", "--env", "OMP_NUM_THREADS=3"),
        *("train.py", "a b"),
    )
    lines = result.stdout.splitlines()
    job = lines[0].split()[1]
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines == [
        f"job        {job}",
        f"command    {sys.executable} -u train.py 'a b'",
        f"folder     {folder}",
        "start      fork",
        f"logs       {folder}/logs/{job}",
        "grace      10s between asking and killing",
        "ranks      0-1 on localhost (this machine)",
        "cores      0-1 on any cpu, 3 threads a rank",
        "variables  OMP_NUM_THREADS=3",
    ]
    assert not (folder / "logs").exists()


@pytest.mark.parametrize(("args", "start"), [([], "fork"), (["--start", "exec"], "exec"), (["--no-python"], "exec")])
def test_ranks_are_forked_unless_asked_or_impossible(folder: Path, args: list[str], start: str) -> None:
    target = "sh" if args == ["--no-python"] else "train.py"
    assert json.loads(dry(*args, target).stdout)["start"] == start


def test_a_shell_script_runs_as_it_is(folder: Path) -> None:
    (folder / "train.sh").write_text("#!/bin/sh\n")
    (folder / "train.sh").chmod(0o755)
    plan = json.loads(dry("train.sh", "--lr", "3").stdout)
    assert [plan["program"][key] for key in ("kind", "target", "args")] == ["command", "./train.sh", ["--lr", "3"]]
    assert "\nstart    exec, as the program is not Python\n" in invoke("--dry-run", "train.sh").stdout
    assert refused("--start", "fork", "train.sh") == (
        "error: `--start fork` cannot fork ./train.sh: it is a sh script, not Python\nhint: leave `--start fork` out\n"
    )


@pytest.mark.parametrize(("text", "seconds"), [("3", 3), ("3s", 3), ("0", 0), ("1.5s", 1.5), ("2m", 120)])
def test_grace_is_a_time(text: str, seconds: float) -> None:
    assert json.loads(dry("--grace", text, "train.py").stdout)["grace_s"] == seconds


# What is refused before anything starts


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["tran.py"], "script tran.py: no such file", "did you mean `train.py`?"),
        (["prob"], "script prob: no such file", "did you mean `dsrun probe`?"),
        (["list"], "script list: no such file", "did you mean `dsrun ps`?"),
        (["kill"], "script kill: no such file", "did you mean `dsrun stop`?"),
        (["ls"], "script ls: no such file", "did you mean `dsrun ps`?"),
        (["prune"], "script prune: no such file", "did you mean `dsrun rm`?"),
        (["help"], "script help: no such file", "did you mean `dsrun --help`?"),
        (["run"], "no script is named", "`dsrun train.py` runs one; see `dsrun run --help`"),
        (
            ["--learning-rate", "3", "train.py"],
            "`dsrun run` has no option `--learning-rate`",
            "see `dsrun run --help`; options of the script stand after it",
        ),
        (["--backnd", "gloo"], "`dsrun run` has no option `--backnd`", "did you mean `--backend`?"),
        (
            ["-n", "0", "x"],
            "`-n/--ranks-per-host`: expected a number of ranks from 1 to 4096, got `0`",
            "see `dsrun run --help`",
        ),
        (
            ["-n", "two", "x"],
            "`-n/--ranks-per-host`: expected a number of ranks from 1 to 4096, got `two`",
            "see `dsrun run --help`",
        ),
        ([""], "script: the name is empty", "`dsrun train.py` runs `train.py`; see `dsrun run --help`"),
        (["--log-dir", "", "x"], "`--log-dir`: expected a path, got an empty word", "see `dsrun run --help`"),
        (["-H", "", "x"], "`-H/--hostfile`: expected a path, got an empty word", "see `dsrun run --help`"),
        (
            ["--hang-timeout", "0s", "x"],
            "`--hang-timeout`: expected a time above 0, got `0s`",
            "see `dsrun run --help`",
        ),
        (
            ["--grace", "soon", "x"],
            "`--grace`: expected a time like `10s` or `2m`, got `soon`",
            "see `dsrun run --help`",
        ),
        (["--backend", "mpi", "x"], "`--backend`: 'mpi' is not one of 'nccl', 'gloo'", "see `dsrun run --help`"),
        (["-m", "--no-python", "x"], "`-m` and `--no-python` exclude each other", "leave one of them out"),
        (["-m", "train.py"], "module train.py: is a file; expected `package.module`", "leave `-m` out to run it"),
        (["-m", "no_such.mod"], "module no_such.mod: there is no module `no_such`", None),
        (["-m", "json.nothing"], "module json.nothing: there is no module `json.nothing`", None),
        (["-m", "json"], "module json: is a package without a `__main__`", "name a module inside it"),
        (["-m", "a-b"], "module a-b: is no module name; expected `package.module`", None),
        (["--no-python", "no-such-program"], "command no-such-program: there is no such program", None),
        (["--no-python", "./train.py"], "command ./train.py: is not executable", None),
        (["-H", "hosts", "train.py"], "hosts: the hostfile cannot be read: no such file or directory", None),
        (["--include", "box:0", "train.py"], "--include:1: no host is called `box`", None),
        (
            ["--nodes", "2", "train.py"],
            "`--nodes 2`: without a hostfile there is this machine alone",
            "name the hosts: `-H hosts`",
        ),
        (["--transport", "pdsh", "x"], "`--transport`: 'pdsh' is not one of 'ssh', 'openssh', 'srun', 'local'", None),
        (
            ["--transport", "srun", "train.py"],
            "`--transport srun` needs a Slurm job, and this process runs in none",
            None,
        ),
        (["--connect-timeout", "0", "x"], "`--connect-timeout`: expected a time above 0, got `0`", None),
        (["--env-file", "no", "train.py"], "no: cannot read this file of variables: No such file or directory", None),
        (["--env", "NOPE_X", "train.py"], "`--env NOPE_X` copies a variable that is not set here", None),
        (["train.py", "--config", "no.json"], "file not found: no.json", None),
        (["train.py", "--config"], "`--config` after the script names no file", None),
        (
            ["--config", "ds.json", "train.py", "--config", "tool.yaml"],
            "`--config ds.json` and `--config tool.yaml` name different configs",
            "a job has one config: give one of them",
        ),
        (
            ["train.py", "--config", "ds.json", "--deepspeed_config", "tool.yaml"],
            "`--config ds.json` and `--deepspeed_config tool.yaml` name different configs",
            "a job has one config: give one of them",
        ),
        (
            ["train.py", "--config", "tool.yaml"],
            "tool.yaml: this is no dsrun config: none of its 2 keys is known (`name`, `seed`)",
            "if the file is for the script, put `--` before the script: `dsrun -- train.py --config FILE`",
        ),
    ],
)
def test_bad_words_are_told_with_a_way_out(args: list[str], message: str, hint: str | None) -> None:
    first, *rest = refused(*args).splitlines()
    assert first == f"error: {message}"
    assert hint is None or rest[0] == f"hint: {hint}"


def test_a_folder_is_no_script(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text("")
    assert refused("package") == (
        "error: script package: is a folder; expected a Python file\nhint: did you mean `package/train.py`?\n"
    )
    (folder / "package" / "__main__.py").write_text("")
    assert "hint: `dsrun -m package` runs it as a module\n" in refused("package")


def test_a_pipe_is_no_script(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    assert refused("pipe.py") == "error: script pipe.py: is no regular file; expected a Python file\n"


def test_all_problems_are_told_in_one_go(folder: Path) -> None:
    (folder / "hosts").write_text("worker-1 slots=2\nlocalhost slots=0\n")
    (folder / "bad.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 7}}')
    text = refused("-H", "hosts", "--env", "NOPE_X", "--backend", "nccl", "tran.py", "--config", "bad.json")
    assert [line for line in text.splitlines() if line.startswith("error: ")] == [
        "error: script tran.py: no such file",
        "error: `--env NOPE_X` copies a variable that is not set here",
        "error: hosts:2:17: `slots` is 0; expected 1 to 4096",
        *[line for line in text.splitlines() if "`--backend nccl` needs a GPU" in line],
        "error: bad.json:1:56: `zero_optimization.stage` is 7; expected 0, 1, 2 or 3",
    ]
    assert "needs a GPU and this machine offers none" in text


# Several hosts, as planned: nobody is contacted


HOSTS = """\
localhost slots=1
worker-1 slots=2 user=ada addr=10.0.0.4 port=2222 python=/opt/py/bin/python env.NCCL_DEBUG=WARN
worker-2 gpus=1,3
"""


def test_the_plan_of_several_hosts_says_how_each_is_reached_and_what_its_ranks_get(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What other hosts would get of it: python's, and torch's, which sets some itself where another test imports it.
    for name in passed_on(os.environ):
        monkeypatch.delenv(name)
    (folder / "hosts").write_text(HOSTS)
    result = invoke("-H", "hosts", "--bind", "none", "--dry-run", "--env", "OMP_NUM_THREADS=2", "train.py")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("ranks "))
    assert lines[at:] == [
        "ranks      0 on localhost (hosts:1), here",
        "           1-2 on worker-1 (hosts:2), by ssh ada@10.0.0.4 port 2222, with /opt/py/bin/python",
        "           3-4 on worker-2 (hosts:3), GPUs 1,3, by ssh worker-2",
        "cores      0 on any cpu, 2 threads a rank",
        "variables  OMP_NUM_THREADS=2",
        "           NCCL_DEBUG=WARN on worker-1",
    ]


def test_hosts_may_come_from_the_pipe_of_a_shell(folder: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"w[1-2] slots=2\n")
    os.close(writer)
    try:
        plan = json.loads(dry("-H", f"/dev/fd/{reader}", "train.py").stdout)
    finally:
        os.close(reader)
    assert [node["host"]["name"] for node in plan["nodes"]] == ["w1", "w2"]


def test_the_plan_as_json_says_the_same(folder: Path) -> None:
    (folder / "hosts").write_text(HOSTS)
    plan = json.loads(dry("-H", "hosts", "--transport", "openssh", "train.py").stdout)
    assert plan["reached"] == {
        "localhost": "here",
        "worker-1": "openssh ada@10.0.0.4 port 2222",
        "worker-2": "openssh worker-2",
    }
    assert [node["chosen"] for node in plan["nodes"]] == [None, None, [1, 3]]


def test_settings_of_libraries_reach_other_hosts_and_secrets_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "hosts").write_text("worker-1 slots=1\n")
    (folder / "vars").write_text("A=1\nNCCL_DEBUG='WARN'\nB=2\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    there = json.loads(dry("-H", "hosts", "--env-file", "vars", "--env", "B=3", "train.py").stdout)["env"]
    assert {name: there.get(name) for name in ("NCCL_DEBUG", "NCCL_ALGO", "A", "B", "WANDB_API_KEY")} == {
        "NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "A": "1", "B": "3", "WANDB_API_KEY": None,
    }  # fmt: skip
    # Here they are inherited.
    assert json.loads(dry("train.py").stdout)["env"] == {}


def test_what_is_for_other_hosts_has_a_word_said_where_there_is_none(folder: Path) -> None:
    result = dry("--iface", "eth1", "--sync", "train.py")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: `--iface eth1` has no effect: dsrun starts ranks on this machine alone",
        "warning: `--sync` has no effect: dsrun starts ranks on this machine alone",
    ]


def test_what_is_for_this_machine_has_a_word_said_where_all_ranks_are_elsewhere(folder: Path) -> None:
    (folder / "hosts").write_text("worker-1 slots=1\n")
    result = dry("-H", "hosts", "--queue", "--priority", "3", "--share-gpus", "train.py")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"warning: `{option}` has no effect: it is about GPUs and slots of this machine, where no rank runs"
        for option in ("--queue", "--priority 3", "--share-gpus")
    ]
    assert dry("-H", "hosts", "--transport", "local", "--queue", "train.py").stderr == ""


@pytest.mark.parametrize("verb", ["run", "doctor", "probe"])
def test_an_ssh_config_that_is_named_and_not_there_is_refused(folder: Path, verb: str) -> None:
    (folder / "hosts").write_text("worker-1 slots=1\n")
    result = invoke(
        verb, "-H", "hosts", "--ssh-config", "none.txt", *(["--dry-run", "train.py"] if verb == "run" else [])
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0] == "error: `--ssh-config`: none.txt: no such file or directory"


def test_ranks_work_where_workdir_says_and_names_of_files_are_meant_from_here(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    plan = json.loads(dry("--workdir", "elsewhere", "train.py", "--config", "ds.json").stdout)
    assert (plan["cwd"], plan["program"]["target"]) == (str(folder / "elsewhere"), str(folder / "train.py"))
    assert plan["env"]["DSRUN_CONFIG"] == str(folder / "ds.json")
    assert refused("--workdir", "nowhere", "train.py") == (
        f"error: `--workdir`: {folder}/nowhere is no folder of this machine\n"
        "hint: make it first, or leave `--workdir` out\n"
    )


def test_a_copied_tree_is_run_where_it_is_copied_to(folder: Path) -> None:
    (folder / "hosts").write_text("worker-1 slots=1\n")
    plan = json.loads(dry("-H", "hosts", "--sync", "--workdir", "/data/run", "train.py", "--config", "ds.json").stdout)
    assert (plan["cwd"], plan["program"]["target"]) == ("/data/run", "/data/run/train.py")
    assert plan["env"]["DSRUN_CONFIG"] == "/data/run/ds.json"


STATIC = ("--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29501")


def test_one_of_several_nodes_starts_its_own_ranks_and_counts_all(folder: Path) -> None:
    plan = json.loads(dry(*STATIC, "-n", "2", "train.py", "--config", "ds.json").stdout)
    assert [worker["rank"] for worker in plan["nodes"][0]["workers"]] == [2, 3]
    assert (plan["master_addr"], plan["outside"]["port"], plan["outside"]["node_count"]) == ("10.0.0.1", 29501, 2)
    text = invoke(*STATIC, "-n", "2", "--iface", "lo", "--dry-run", "train.py").stdout.splitlines()
    assert "ranks      2-3 on localhost (this machine)" in text
    assert "nodes      this is 1 of 2; they meet at 10.0.0.1 port 29501" in text
    assert "variables  GLOO_SOCKET_IFNAME=lo" in text
    # The config is one of four ranks here, and of three nodes with two each there.
    three = [*STATIC[2:], "--nodes", "3"]
    assert "`train_batch_size` 4 is no multiple of 6" in refused(*three, "-n", "2", "train.py", "--config", "ds.json")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (STATIC[:4], "`--node-rank` without `--master-addr ADDR`"),
        (STATIC[2:], "`--node-rank` without `--nodes N`"),
        ((*STATIC, "-H", "hosts"), "`--hostfile` and `--node-rank` cannot be used together"),
        ((*STATIC, "--include", "localhost"), "`--include` and `--node-rank` cannot be used together"),
        (
            (*STATIC, "--max-restarts", "1"),
            "`--max-restarts` and `--node-rank` cannot be used together: a job is started again by one dsrun for all "
            "hosts",
        ),
        ((*STATIC, "--nodes", "1"), "`--node-rank 1` of `--nodes 1`: expected 0 to 0"),
        ((*STATIC, "--nodes", "0"), "`--nodes 0`: expected 1 or more"),
        ((*STATIC, "--iface", "lo,ib77"), "`--iface ib77`: no interface of that name has an address"),
        ((*STATIC, "--iface", "l"), "`--iface l`: no interface of that name has an address"),
        ((*STATIC, "--master-port", "0"), "`--master-port`: expected a port from 1 to 65535, got `0`"),
    ],
)
def test_a_node_that_is_not_said_in_full_is_refused(args: tuple[str, ...], message: str) -> None:
    assert refused(*args, "train.py").splitlines()[0] == f"error: {message}"


@pytest.mark.parametrize("args", [["-n", "2"], ["-H", "hosts"], ["--env-file", "vars"], ["--dry-run"]])
def test_what_only_a_launcher_could_obey_is_refused_below_another(
    args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert refused(*args, "train.py") == (
        f"error: `{args[0]}` is for a launcher, and Open MPI has started this process as one of its ranks\n"
        "hint: leave it to Open MPI, or run dsrun without Open MPI\n"
    )


def test_memory_of_other_hosts_is_not_predicted_from_this_one(folder: Path) -> None:
    (folder / "hosts").write_text("worker-1 slots=1\n")
    assert refused("-H", "hosts", "--model", "7B", "train.py") == (
        "error: `--model` predicts for this machine alone, and the job has other hosts\n"
        "hint: `dsrun plan 7B --gpus 2x8xH100-80G` predicts for hosts like the ones named\n"
    )


def test_a_config_given_as_text_to_deepspeeds_flag_is_checked_and_left_to_the_script() -> None:
    good = json.loads(dry("train.py", "--deepspeed_config", '{"train_batch_size": 4}').stdout)
    assert "DSRUN_CONFIG" not in good["env"]
    assert "zero_optimization.stage" in refused(
        "train.py", "--deepspeed_config", '{"train_batch_size": 4, "zero_optimization": {"stage": 7}}'
    )


def test_a_config_of_the_environment_is_checked_like_one_of_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.json").write_text('{"train_batch_size": 8}')
    monkeypatch.setenv("DSRUN_CONFIG", "ds.json")
    assert json.loads(dry("-n", "2", "train.py").stdout)["env"]["DSRUN_CONFIG"] == str(folder / "ds.json")
    assert "`train_batch_size` 4 is no multiple of 3" in refused("-n", "3", "train.py")
    chosen = json.loads(dry("train.py", "--config", "other.json").stdout)
    assert chosen["env"]["DSRUN_CONFIG"] == str(folder / "other.json")
    monkeypatch.setenv("DSRUN_CONFIG", "gone.json")
    assert refused("train.py") == (
        "error: file not found: gone.json\n"
        "hint: did you mean `other.json` or `ds.json`?\n"
        "error: `DSRUN_CONFIG` in the environment is `gone.json`, which is no config to train with\n"
        "hint: `unset DSRUN_CONFIG`, or name another with `--config FILE`\n"
    )
    monkeypatch.setenv("DSRUN_CONFIG", "")
    assert "DSRUN_CONFIG" not in json.loads(dry("train.py").stdout)["env"]


def test_a_config_is_checked_for_the_ranks_of_the_job(folder: Path) -> None:
    assert dry("-n", "2", "train.py", "--config", "ds.json").exit_code == 0
    assert "4" in refused("-n", "3", "train.py", "--config", "ds.json")


# config check


def test_config_check_says_what_is_fine_and_what_is_not(folder: Path) -> None:
    (folder / "bad.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 7}}')
    result = invoke("config", "check", "ds.json", "bad.json", "no.json")
    assert (result.exit_code, result.stdout) == (2, "ds.json: ok\n")
    assert "error: bad.json:1:56: `zero_optimization.stage` is 7; expected 0, 1, 2 or 3\n" in result.stderr
    assert "file not found: no.json" in result.stderr


def test_a_folder_that_cannot_be_made_is_the_users_to_know() -> None:
    assert refused("--log-dir", "train.py", "train.py") == (
        "error: log folder train.py: cannot be made: file exists\nhint: name another with `--log-dir DIR`\n"
    )


# Start-up


def imported_by(*args: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running the command."""
    code = (
        "import contextlib, io, sys\n"
        "from dsrun.launcher.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):\n"
        f"    main({list(args)!r})\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    env = clean_environment()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return set(done.stdout.split())


def test_help_imports_click_and_the_standard_library_only() -> None:
    loaded = imported_by("--help")
    allowed = {"click", "dsrun", "__main__", "__mp_main__"} | set(sys.stdlib_module_names)
    # Whatever a site puts into every interpreter (`.pth` files) is not ours to judge.
    baseline = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded - allowed - {name.partition(".")[0] for name in baseline} == set()


@pytest.mark.parametrize(
    "args",
    [["probe"], ["probe", "--json"], ["--dry-run", "train.py"], ["--dry-run", "train.py", "--config", "ds.json"]],
)
def test_neither_torch_nor_numpy_is_imported_before_a_rank_starts(args: list[str]) -> None:
    assert imported_by(*args).isdisjoint({"torch", "numpy"})


@pytest.mark.depends_on_speed("0.15 s of a core")
def test_help_is_there_at_once() -> None:
    """The best of five, for caches may be cold."""
    assert program_core_seconds([sys.executable, "-m", "dsrun", "--help"], tries=5) < 0.15


def test_the_steps_to_profile_reach_the_ranks_as_a_variable(folder: Path) -> None:
    env = json.loads(dry("--profile", "steps=2:3,memory", "train.py").stdout)["env"]
    assert profile_request(env) == ProfileRequest(first=2, last=3, memory=True)
    assert "DSRUN_PROFILE" not in json.loads(dry("train.py").stdout)["env"]


@pytest.mark.parametrize("value", ["steps=13:10", "steps=0:3", "steps=1:2,ranks=99", "ranks=0"])
def test_steps_to_profile_that_make_no_sense_start_nothing(folder: Path, value: str) -> None:
    assert "`--profile`" in refused("run", "--profile", value, "train.py")


def test_memory_history_reaches_the_ranks_as_a_variable(folder: Path) -> None:
    assert json.loads(dry("--memory-history", "train.py").stdout)["env"]["DSRUN_MEMORY_HISTORY"] == "1"
    assert "DSRUN_MEMORY_HISTORY" not in json.loads(dry("train.py").stdout)["env"]


def test_a_script_for_deepspeed_keeps_all_its_words_and_the_plan_says_what_it_finds(folder: Path) -> None:
    words = ("train.py", "--config", "a.yaml", "--deepspeed", "ds.json", "--deepspeed_config=b", "--local_rank", "0")
    plan = json.loads(dry("--as-deepspeed", *words).stdout)
    assert plan["program"]["args"] == list(words[1:])
    assert plan["env"] == {"DSRUN_AS_DEEPSPEED": "0.19.8"}
    assert "deepspeed  is dsrun (as 0.19.8)\n" in invoke("--as-deepspeed", "--dry-run", "train.py").stdout
    assert "is dsrun" not in invoke("--dry-run", "train.py").stdout
    older = json.loads(dry("--as-deepspeed", "--env", "DSRUN_AS_DEEPSPEED_VERSION=0.17.5", "train.py").stdout)
    assert older["env"]["DSRUN_AS_DEEPSPEED"] == "0.17.5"


def test_a_version_of_deepspeed_that_dsrun_cannot_stand_for_is_refused_with_all_else(folder: Path) -> None:
    result = invoke("--as-deepspeed", "--env", "DSRUN_AS_DEEPSPEED_VERSION=9", "--dry-run", "no-such.py")
    assert result.exit_code == 2
    assert "DSRUN_AS_DEEPSPEED_VERSION is '9'" in result.stderr
    assert "no-such.py" in result.stderr
    reserved = invoke("--env", "DSRUN_AS_DEEPSPEED=1", "--dry-run", "train.py")
    assert "hint: use `--as-deepspeed`" in reserved.stderr
