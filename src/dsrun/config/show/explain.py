"""What a key means, as text: `dsrun config explain KEY`."""

from __future__ import annotations

import difflib
import textwrap

from dsrun.config.knob import Status
from dsrun.config.legacy import OLD_FLAGS, OLD_SCALE_KEYS
from dsrun.config.sections.training import Training
from dsrun.config.show.keys import Key, all_keys
from dsrun.errors import ConfigError


def find(name: str) -> list[Key]:
    """Returns the keys a user may mean.

    Args:
        name: dotted path, or the end of one: `stage` finds `zero_optimization.stage`. Old names are found too.

    Returns:
        One key, or those of several types where they share a path (`optimizer.params.lr`).

    Raises:
        ConfigError: there is no such key, it is gone, or the name fits several paths.
    """
    keys = list(all_keys())
    wanted = name.strip().strip("`")
    found = [key for key in keys if wanted in (key.path, *(_beside(key, old) for old in key.other_names))]
    if found:
        return _built_first(found)
    ends = [key for key in keys if key.path.endswith(f".{wanted}") or wanted in key.other_names]
    paths = list(dict.fromkeys(key.path for key in ends))
    if len(paths) == 1:
        return _built_first(ends)
    if paths:
        shown = ", ".join(f"`{path}`" for path in paths[:6]) + (", ..." if paths[6:] else "")
        raise ConfigError(f"`{wanted}` is the end of {len(paths)} keys: {shown}", hint="give the whole path")
    section = OLD_FLAGS.get(wanted.split(".")[-1])
    if section is not None:
        new = f"zero_optimization.{section}.device"
        raise ConfigError(f"`{wanted}` is an old form of `{new}`", hint=f"see `dsrun config explain {new}`")
    scale = OLD_SCALE_KEYS.get(wanted.split(".")[-1])
    if "dynamic_loss_scale" in wanted.split("."):
        new = f"fp16.{scale or 'initial_scale_power'}"
        raise ConfigError(f"`{wanted}` is an old form of keys of `fp16`", hint=f"see `dsrun config explain {new}`")
    _refuse_gone(wanted, keys)
    close = difflib.get_close_matches(wanted, [*(key.path for key in keys), *(key.name for key in keys)], n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`dsrun config explain` without a key lists all"
    raise ConfigError(f"`{wanted}` is not a key of the config", hint=hint)


def explain(key: Key) -> str:
    """Returns everything the schema knows of a key, a fact a line."""
    meaning = key.meaning
    types = f" ({', '.join(key.types)})" if key.types else ""
    lines = [f"{key.path}{types}", f"  {meaning.text}", ""]
    facts: list[tuple[str, str]] = []
    if key.inner is None and meaning.choices is None:
        takes_auto = meaning.auto is not None and '"auto"' not in key.expected
        facts.append(("value", key.expected + (' or "auto"' if takes_auto else "")))
        facts.append(("default", key.default_text + (f" (DeepSpeed: {meaning.differs})" if meaning.differs else "")))
    if meaning.unit:
        facts.append(("unit", meaning.unit))
    if meaning.effect:
        facts.append(("effect", meaning.effect))
    if meaning.auto:
        facts.append(("auto", f'"auto" is {meaning.auto.value}'))
    if meaning.stages:
        facts.append(("acts at", "ZeRO stage " + ", ".join(str(stage) for stage in meaning.stages)))
    facts.append(("status", status_text(key)))
    if key.other_names:
        facts.append(("also read", ", ".join(f"`{old}`" for old in key.other_names)))
    if meaning.users:
        configs, repositories = meaning.users
        facts.append(("set by", f"{configs} of 343 surveyed configs, from {repositories} of 45 repositories"))
    facts.extend(_inside(key))
    width = max(len(label) for label, _ in facts)
    for label, text in facts:
        first, *rest = textwrap.wrap(text, width=110 - width, break_on_hyphens=False) or [""]
        lines.append(f"  {label.ljust(width)}  {first}")
        lines.extend(f"  {' ' * width}  {line}" for line in rest)
    return "\n".join(lines)


def status_text(key: Key) -> str:
    """What dsrun does with a key, in a few words."""
    reason = key.reason
    match key.status:
        case Status.WORKS if key.meaning.planned:
            values = " and ".join(f'"{value}"' for value in key.meaning.planned)
            return f"works; {values} is refused, for this version does not {reason} yet"
        case Status.WORKS:
            return "works"
        case Status.PLANNED if key.meaning.harmless:
            return f"planned; accepted with a note, for this version does not {reason} yet"
        case Status.PLANNED:
            return f"planned; refused, for this version does not {reason} yet"
        case Status.NO_MEANING:
            return f"no meaning here: {reason}"
        case Status.REMOVED:
            return f"removed: {reason}"


def overview() -> str:
    """Returns the top level of the schema, a key a line."""
    keys = [key for key in all_keys() if "." not in key.path]
    width = max(len(key.path) for key in keys)
    return "\n".join(f"{key.path.ljust(width)}  {key.meaning.text}" for key in keys)


def _built_first(keys: list[Key]) -> list[Key]:
    """Leaves out types that are not built where some that are have the key too."""
    return [key for key in keys if key.section.default_status is not Status.PLANNED] or keys


def _beside(key: Key, old: str) -> str:
    return key.path.removesuffix(key.name) + old


def _inside(key: Key) -> list[tuple[str, str]]:
    if key.inner is not None:
        return [("keys", ", ".join(key.inner.model_fields))]
    choices = key.meaning.choices
    if choices is None:
        return []
    rows = [(kind, ", ".join(model.model_fields)) for kind, model in choices.models.items()]
    return [*rows, ("planned", ", ".join(choices.planned))]


def _refuse_gone(wanted: str, keys: list[Key]) -> None:
    sections = {Training, *(key.inner for key in keys if key.inner is not None), *(key.section for key in keys)}
    for section in sections:
        for table, verb in ((section.removed, "is gone"), (section.dropped, "does nothing")):
            for old, text in table.items():
                if wanted.split(".")[-1] == old:
                    raise ConfigError(f"`{wanted}` {verb}: {text}")
