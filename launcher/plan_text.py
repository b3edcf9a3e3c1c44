"""A launch plan for people: what `dsrun --dry-run` prints. The plan's own JSON stands in plan.py."""

from __future__ import annotations

import shlex

from .environment import masked
from .plan import LaunchPlan, NodePlan


def describe_plan(plan: LaunchPlan) -> str:
    """Returns the plan as aligned lines, ready to be read and to be pasted into a shell."""
    rows = [
        ("job", plan.job_id),
        ("command", shlex.join(plan.program.words())),
        ("folder", plan.cwd),
        ("start", plan.start),
        ("logs", plan.run_dir),
        ("grace", f"{plan.grace_s:g}s between asking and killing"),
    ]
    for position, node in enumerate(plan.nodes):
        rows.append(("ranks" if position == 0 else "", _describe_node(node)))
    variables = {**plan.env, **(plan.nodes[0].workers[0].env if plan.nodes else {})}
    for position, (name, value) in enumerate(sorted(variables.items())):
        rows.append(("variables" if position == 0 else "", f"{name}={masked(name, shlex.quote(value))}"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _describe_node(node: NodePlan) -> str:
    first, last = node.workers[0].rank, node.workers[-1].rank
    span = str(first) if first == last else f"{first}-{last}"
    return f"{span} on {node.host.name} ({node.host.source})"
