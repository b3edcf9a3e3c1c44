"""A launch plan for people, without secrets: what `dsrun --dry-run` prints. The plan's own JSON stands in plan.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby

from dsrun.contract.environment import AS_DEEPSPEED_ENV

from ..masking import MASK, masked, masked_words
from ..number_ranges import number_ranges
from ..plan.affinity import Binding
from ..plan.launch_plan import LaunchPlan, NodePlan


def describe_plan(
    plan: LaunchPlan,
    *,
    bindings: Mapping[str, Sequence[Binding]] | None = None,
    reached: Mapping[str, str] | None = None,
) -> str:
    """Returns the plan as aligned lines, ready to be read and to be pasted into a shell.

    Args:
        plan: the launch.
        bindings: cores and threads of the ranks of each host, by host name, for the hosts that were asked
            (`Launch.bindings`).
        reached: description of the way to each host, by host name (`Launch.reached`).
    """
    rows = [
        ("job", plan.job_id),
        ("command", shlex.join(masked_words(plan.program.words()))),
        ("folder", plan.cwd),
        ("start", _start(plan)),
        ("logs", plan.run_dir),
        ("grace", f"{plan.grace_s:g}s between asking and killing"),
    ]
    if AS_DEEPSPEED_ENV in plan.env:
        rows.append(("deepspeed", f"is dsrun (as {plan.env[AS_DEEPSPEED_ENV]})"))
    if plan.max_restarts:
        rows.append(("restarts", f"at most {plan.max_restarts}"))
    if plan.stdin_rank is not None and plan.world_size > 1:
        rows.append(("stdin", f"rank {plan.stdin_rank} has it"))
    ways = reached or {}
    is_here_alone = all(way == "here" for way in ways.values())
    for position, node in enumerate(plan.nodes):
        way = "" if is_here_alone else ways.get(node.host.name, "")
        rows.append(("ranks" if position == 0 else "", _describe_node(node, way)))
    if (outside := plan.outside) is not None:
        meet = f"{plan.master_addr} port {outside.port}"
        rows.append(("nodes", f"this is {outside.node_rank} of {outside.node_count}; they meet at {meet}"))
    found = bindings or {}
    cores = [line for node in plan.nodes for line in _describe_cores(node, found.get(node.host.name, ()))]
    rows += [("cores" if position == 0 else "", line) for position, line in enumerate(cores)]
    variables = [*_variables(plan.env), *(line for node in plan.nodes for line in _variables_of(node, plan))]
    rows += [("variables" if position == 0 else "", line) for position, line in enumerate(variables)]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _variables(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={_shown(name, value)}" for name, value in sorted(env.items())]


def _variables_of(node: NodePlan, plan: LaunchPlan) -> list[str]:
    """Returns what one host's ranks get beside the variables of all; of several hosts with its name."""
    where = "" if len(plan.nodes) == 1 else f" on {node.host.name}"
    own = {**node.env, **node.host.env, **(node.workers[0].env if node.workers else {})}
    return [f"{line}{where}" for line in _variables(own)]


def _shown(name: str, value: str) -> str:
    text = masked(name, value)
    return text if text == MASK else shlex.quote(text)


def _start(plan: LaunchPlan) -> str:
    return "exec, as the program is not Python" if plan.program.kind == "command" else plan.start


def _describe_node(node: NodePlan, way: str) -> str:
    first, last = node.workers[0].rank, node.workers[-1].rank
    by = "" if not way else f", {way}" if way == "here" else f", by {way}"
    python = "" if node.host.python is None else f", with {node.host.python}"
    gpus = "" if node.chosen is None else f", GPU{'s' * (len(node.chosen) > 1)} {number_ranges(node.chosen)}"
    return f"{_span(first, last)} on {node.host.name} ({node.host.source}){gpus}{by}{python}"


def _describe_cores(node: NodePlan, bindings: Sequence[Binding]) -> list[str]:
    """Returns a line for each run of ranks with the same binding."""
    lines: list[str] = []
    ranks = iter(worker.rank for worker in node.workers)
    for binding, group in groupby(bindings):
        mine = [next(ranks) for _ in group]
        where = "any cpu" if binding.cpus is None else f"cpu {number_ranges(binding.cpus)}"
        threads = f"{binding.threads} thread{'s' if binding.threads > 1 else ''} a rank"
        lines.append(f"{_span(mine[0], mine[-1])} on {where}, {threads}")
    return lines


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
