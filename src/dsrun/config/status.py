"""What a valid key does in this version: nothing asked, refused as not built yet, noted, or without meaning."""

from __future__ import annotations

from typing import Any

from dsrun.config.build import is_comment
from dsrun.config.findings import Code, Report
from dsrun.config.knob import Section, Status
from dsrun.config.text.tree import Node, Position, join, show


def judge(
    section: Section,
    node: Node,
    path: str,
    *,
    zero_stage: int | None,
    report: Report,
    by_program: bool = False,
    is_other_stage: bool = False,
) -> None:
    """Reports every key of `section`, as written in `node`, that does not do what it says.

    Args:
        section: the checked section.
        node: parsed object from which the section was made.
        path: its dotted path, empty for the whole config.
        zero_stage: stage of the config, for keys that act at some stages only; None where it is wrong.
        report: report that receives an error, warning or note for each such key.
        by_program: whether a program made the config: a section that would only tell about the run is left out with a
            note.
        is_other_stage: whether the stage is not the one that is written, see `Training.cutting_stage`.
    """
    model = type(section)
    broken = report.broken_keys
    for key, child in (node.members or {}).items():
        name = key if key in model.model_fields else model.renamed.get(key)
        full = join(path, name or key)
        if name is None or is_comment(key) or child.value is None or full in broken:
            continue
        if not _is_on(section) and model.switch and name != model.switch[0]:
            continue
        value: Any = getattr(section, name)
        at = node.keys_at.get(key, child.at)
        if isinstance(value, Section) and model.status_of(name) is not Status.NO_MEANING:
            if by_program and value.only_tells and _is_on(value) and type(value).default_status is Status.PLANNED:
                message = f"`{full}` is left out: this version does not {type(value).default_reason} yet"
                report.note(Code.PLANNED, full, message, at)
            elif _refused(model, name, value):
                report.error(Code.PLANNED, full, f"`{full}` is set; {_not_yet(model, name)}", at)
            else:
                judge(
                    value,
                    child,
                    full,
                    zero_stage=zero_stage,
                    report=report,
                    by_program=by_program,
                    is_other_stage=is_other_stage,
                )
            continue
        said = _judge_value(
            model,
            name,
            value,
            full,
            at,
            zero_stage=zero_stage,
            report=report,
            by_program=by_program,
            is_other_stage=is_other_stage,
        )
        if said and model.switch and name == model.switch[0]:
            return  # the whole section is refused by its switch; its other keys add nothing


def _judge_value(
    model: type[Section],
    name: str,
    value: Any,
    full: str,
    at: Position,
    *,
    zero_stage: int | None,
    report: Report,
    by_program: bool,
    is_other_stage: bool,
) -> bool:
    """Judges one value; returns whether it was refused."""
    meaning, status = model.knob_of(name), model.status_of(name)
    default = model.model_fields[name].get_default(call_default_factory=True)
    idle = value == default or value in meaning.idle
    # A number that repeats the default still asks for that number; a flag that repeats it asks for nothing.
    asks = not idle or (meaning.harmless and value not in meaning.idle and not isinstance(value, (bool, tuple)))
    if not asks:
        return False
    is_idle_here = bool(meaning.stages) and zero_stage is not None and zero_stage not in meaning.stages
    # A trainer writes one dict for all stages: what nothing reads at this one asks for nothing.
    is_planned = (status is Status.PLANNED and not meaning.harmless) or value in meaning.planned
    if is_planned and not (by_program and is_idle_here):
        report.error(Code.PLANNED, full, f"`{full}` is {_shown(value)}; {_not_yet(model, name)}", at)
        return True
    if is_idle_here:
        stages = " and ".join(str(stage) for stage in meaning.stages)
        report.warning(
            Code.NO_EFFECT,
            full,
            f"`{full}` has no effect where state is held as at `zero_optimization.stage` {zero_stage}, only at {stages}"
            if is_other_stage
            else f"`{full}` has no effect at `zero_optimization.stage` {zero_stage}, only at {stages}",
            at,
        )
    elif status is Status.PLANNED:
        report.note(Code.PLANNED, full, f"`{full}` has no effect yet: this version does not {model.why_of(name)}", at)
    elif status is Status.NO_MEANING:
        report.warning(Code.NO_EFFECT, full, f"`{full}` has no meaning here: {model.why_of(name)}", at)
    return False


def _is_on(section: Section) -> bool:
    return section.switch is None or getattr(section, section.switch[0]) != section.switch[1]


def _refused(model: type[Section], name: str, value: Section) -> bool:
    """A whole section that is planned and has no switch or keys of its own to judge by."""
    return model.knob_of(name).status is Status.PLANNED and value.switch is None


def _not_yet(model: type[Section], name: str) -> str:
    return f"this version does not {model.why_of(name)} yet"


def _shown(value: Any) -> str:
    return show(list(value) if isinstance(value, tuple) else value)
