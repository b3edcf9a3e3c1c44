from __future__ import annotations

from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.launch.plan_text import describe_plan
from dsrun.launcher.plan.affinity import Binding
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, ProgramKind, StartMethod, make_plan


def plan(
    *args: str,
    ranks: int = 4,
    kind: ProgramKind = "script",
    start: StartMethod = "fork",
    env: dict[str, str] | None = None,
    max_restarts: int = 0,
    w1_python: str | None = None,
) -> LaunchPlan:
    return make_plan(
        Allocation(
            hosts=(
                HostSpec(name="w0", slots=ranks, source="hosts:1"),
                HostSpec(name="w1", slots=1, source="hosts:2", python=w1_python),
            )
        ),
        Program(kind=kind, target="train.py", args=args, python="python"),
        job_id="j",
        start=start,
        cwd="/w",
        env=env or {},
        run_dir="/r",
        grace_s=10.0,
        nonce="n",
        max_restarts=max_restarts,
    )


def row(text: str, label: str) -> list[str]:
    """The lines of one label, without it."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"{label} "))
    width = len(lines[0]) - len(lines[0].split("  ", 1)[1].lstrip())
    found = [lines[first]]
    for line in lines[first + 1 :]:
        if not line.startswith(" "):
            break
        found.append(line)
    return [line[width:] for line in found]


def test_cores_of_the_hosts_that_were_asked_stand_in_the_plan() -> None:
    near, far = Binding(cpus=(0, 1, 2, 3, 8), threads=2), Binding(cpus=(4, 6), threads=1)
    text = describe_plan(plan(), bindings={"w0": (near, near, near, far)})
    assert row(text, "cores") == ["0-2 on cpu 0-3,8, 2 threads a rank", "3 on cpu 4,6, 1 thread a rank"]
    assert "cores" not in describe_plan(plan())


def test_a_host_with_an_interpreter_of_its_own_says_so() -> None:
    text = describe_plan(plan(w1_python="/opt/py/bin/python3"))
    assert row(text, "ranks") == ["0-3 on w0 (hosts:1)", "4 on w1 (hosts:2), with /opt/py/bin/python3"]


def test_ranks_that_are_not_bound_may_run_anywhere() -> None:
    text = describe_plan(plan(ranks=2), bindings={"w0": (Binding(cpus=None, threads=8),) * 2})
    assert row(text, "cores") == ["0-1 on any cpu, 8 threads a rank"]


def test_a_program_that_is_not_python_is_said_to_be_run_as_it_is() -> None:
    assert row(describe_plan(plan(kind="command", start="exec")), "start") == ["exec, as the program is not Python"]
    assert row(describe_plan(plan(start="exec")), "start") == ["exec"]


def test_secrets_are_not_shown() -> None:
    text = describe_plan(plan("--api-key", "hidden-one", env={"HF_TOKEN": "hidden-two", "A": "b c"}))
    assert "hidden" not in text
    assert row(text, "variables") == ["A='b c'", "HF_TOKEN=***"]


def test_restarts_are_told_where_there_may_be_any() -> None:
    assert row(describe_plan(plan(max_restarts=3)), "restarts") == ["at most 3"]
