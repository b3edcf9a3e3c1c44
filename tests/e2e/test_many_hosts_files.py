"""Hosts that share no folder with the front end: their files are their own, what they say of them reaches the job."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from dsrun.contract.environment import BACKEND_ENV, CONFIG_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.hosts.spec import Allocation
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.session.rank_table import Outcome
from dsrun.launcher.transport.ssh.openssh import OpensshTransport
from support.channels import RememberingChannels
from support.jobs import RecordingSink
from support.namespaces import Rig, hosts, why_no_hosts
from support.processes import kill_left, wait_until_gone

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(120)]

#: Saves where only its own host sees it, as the runtime does, and fails; started again, it says where it goes on.
SAVE = """
import json, os, pathlib, sys
if os.environ["RANK"] == "0":
    print(os.environ["DSRUN_RUN_DIR"], os.environ.get("DSRUN_RESUME", "from the start"))
    if "DSRUN_RESUME" not in os.environ:
        with open(os.environ["DSRUN_RUN_DIR"] + "/records.jsonl", "a") as records:
            for tag in ("step2", "step4", "removed"):
                folder = pathlib.Path("/run/checkpoints", tag)
                folder.mkdir(parents=True)
                if tag != "removed":
                    (folder / "index.json").write_text("{}")
                records.write(json.dumps({"event": "checkpoint", "time": 1.0, "path": str(folder)}) + "\\n")
        sys.exit(3)
"""
#: Three steps of a training whose config is the launcher's.
TRAIN = """
import torch, dsrun
from torch import nn
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=nn.Linear(6, 1))
for _ in range(3):
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    engine.step()
engine.destroy()
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Generator[Rig]:
    with hosts(2, tmp_path_factory.mktemp("rig")) as made:
        yield made


def plan_for(rig: Rig, run_dir: Path, source: str) -> LaunchPlan:
    """One rank on each host; the script is seen by all, the run folder by the front end alone."""
    run_dir.mkdir()
    script = rig.folder / f"{run_dir.name}.py"
    script.write_text(source)
    plan = make_plan(
        Allocation(hosts=tuple(host.spec() for host in rig.hosts)),
        Program(kind="script", target=str(script), args=(), python=sys.executable),
        job_id=f"test-{os.getpid()}-{run_dir.name}",
        start="exec",
        cwd=str(rig.folder),
        env={},
        run_dir=str(run_dir),
        grace_s=2,
        nonce="nonce",
    )
    return plan.at(rig.hosts[0].address, {})


def run(plan: LaunchPlan, rig: Rig, sink: RecordingSink, policies: Policies) -> Outcome:
    output = JobOutput(plan, sink)
    channels = RememberingChannels(OpensshTransport(lease_s=plan.lease_s, config=rig.ssh_config))
    try:
        outcome = JobRun(plan, channels, output, python=sys.executable, policies=policies).run()
        assert wait_until_gone(plan.job_id, timeout_s=20) == []
        return outcome
    finally:
        output.close()
        kill_left(plan.job_id)
        channels.end_all()


def test_a_job_goes_on_from_the_newest_checkpoint_that_only_the_host_of_rank_0_sees(rig: Rig, tmp_path: Path) -> None:
    plan, sink = plan_for(rig, tmp_path / "resume", SAVE), RecordingSink()
    outcome = run(plan, rig, sink, Policies(max_restarts=1, first_wait_s=0.1))
    assert (outcome.exit_code, outcome.attempts) == (0, 2), sink.notes
    (first, start), (second, resumed) = (text.split(" ", 1) for text in sink.texts(0))
    assert (start, resumed) == ("from the start", "/run/checkpoints/step4")
    assert plan.run_dir not in (first, second)
    recorded = [json.loads(line) for line in JobPaths(Path(plan.run_dir)).records.read_text().splitlines()]
    assert [Path(record["path"]).name for record in recorded] == ["step2", "step4", "removed"]
    for host in rig.hosts:
        assert plan.job_id not in host.run("ls", "/tmp")


def test_a_training_has_the_config_that_only_the_front_end_sees_and_its_records_come_back(
    rig: Rig, tmp_path: Path
) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.125}}}')
    plan = plan_for(rig, tmp_path / "train", TRAIN)
    env = {CONFIG_ENV: str(config), BACKEND_ENV: "gloo", "OMP_NUM_THREADS": "1"}
    sink = RecordingSink()
    outcome = run(dataclasses.replace(plan, env=env, start="fork"), rig, sink, Policies())
    assert outcome.exit_code == 0, sink.notes
    records = [json.loads(line) for line in JobPaths(Path(plan.run_dir)).records.read_text().splitlines()]
    assert [(record["step"], record["lr"]) for record in records if record["event"] == "step"] == [
        (1, 0.125),
        (2, 0.125),
        (3, 0.125),
    ]


def test_a_working_folder_that_one_host_lacks_is_named_with_it(rig: Rig, tmp_path: Path) -> None:
    rig.hosts[0].run("mkdir", "/run/only-on-n1")
    plan = plan_for(rig, tmp_path / "cwd", "import threading; threading.Event().wait()")
    sink = RecordingSink()
    outcome = run(dataclasses.replace(plan, cwd="/run/only-on-n1"), rig, sink, Policies(max_restarts=3))
    assert (outcome.exit_code, outcome.attempts) == (2, 1), "a mistake is not tried again"
    assert outcome.report is not None
    assert outcome.report.render()[0] == "error: host n2: working folder '/run/only-on-n1': no such folder there"
