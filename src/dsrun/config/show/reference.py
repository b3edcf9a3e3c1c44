"""The reference page docs/config.md and docs/config.schema.json, written from the models.

`python -m dsrun.config.show.reference docs` writes both; a test fails where they are stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from dsrun.config.knob import Section
from dsrun.config.sections.training import Training
from dsrun.config.show.explain import status_text
from dsrun.config.show.json_schema import json_schema
from dsrun.config.show.keys import Key, all_keys

_HEAD = """\
# Config reference

Every key of a training config, written from the schema (`python -m dsrun.config.show.reference docs`). The same texts
come from `dsrun config explain KEY`; `docs/config.schema.json` is the schema for editors.

A config is JSON (comments and trailing commas are fine) or, by its ending, YAML. Keys are DeepSpeed's. A key that is
not here is an error with a suggestion; keys that start with `_` or `//`, and `$schema`, are comments; `null` is the
same as leaving a key out. Integral floats (`5e8`) are read as whole numbers. Text for a number (`"2"`) or a flag
(`"true"`) is read as what it says, with a note.

Status: **works**; **planned**, refused where a value asks for something (the error says so), or accepted with a note
where ignoring it changes no result; **no meaning**, accepted with a warning that says why. "Set by" counts configs, of
343 surveyed.
"""


def page() -> str:
    """Returns the reference page as Markdown."""
    parts = [_HEAD]
    for title, about, keys in _groups():
        parts.append(f"## {title}\n\n{about}\n")
        parts.append("| Key | Value | Default | Meaning | Status | Set by |\n|---|---|---|---|---|---|")
        parts.append("\n".join(_row(key) for key in keys) + "\n")
    parts.append(_names_table())
    return "\n".join(parts)


def schema_text() -> str:
    """Returns the JSON Schema as it is stored."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    """Writes both files into `folder`."""
    (folder / "config.md").write_text(page(), encoding="utf-8")
    (folder / "config.schema.json").write_text(schema_text(), encoding="utf-8")


def _groups() -> Iterator[tuple[str, str, list[Key]]]:
    """Yields (title, sentence, keys) for the top level and for every section that has plain keys."""
    groups: dict[tuple[str, tuple[str, ...]], list[Key]] = {}
    abouts: dict[tuple[str, tuple[str, ...]], type[Section]] = {}
    for key in all_keys():
        path = key.path.rpartition(".")[0]
        groups.setdefault((path, key.types), []).append(key)
        abouts[path, key.types] = key.section
    for (path, types), keys in groups.items():
        if all(key.inner is not None for key in keys):
            continue
        title = f"`{path}`" if path else "Top level"
        title += f" of {', '.join(types)}" if types else ""
        about = (abouts[path, types].__doc__ or "").strip().split("\n")[0]
        yield title, about, [key for key in keys if key.inner is None]


def _row(key: Key) -> str:
    meaning = key.meaning
    value = "an object" if meaning.choices else key.expected
    value += ' or `"auto"`' if meaning.auto and '"auto"' not in value else ""
    default = "" if meaning.choices else key.default_text
    default += f" (DeepSpeed: {meaning.differs})" if meaning.differs else ""
    text = meaning.text
    text += f" Unit: {meaning.unit}." if meaning.unit else ""
    text += f" Effect: {meaning.effect}." if meaning.effect else ""
    text += f' `"auto"`: {meaning.auto.value}.' if meaning.auto else ""
    text += f" Acts at stage {', '.join(str(stage) for stage in meaning.stages)}." if meaning.stages else ""
    users = str(meaning.users[0]) if meaning.users else ""
    cells = (f"`{key.name}`", value, default, text, status_text(key), users)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names_table() -> str:
    """Old names, keys that do nothing and keys that are gone, of all sections."""
    rows: list[str] = []
    seen: set[tuple[str, type[Section]]] = set()
    sections = [("", Training)]
    sections += [(key.path, key.inner) for key in all_keys() if key.inner is not None]
    sections += [(key.path.rpartition(".")[0], key.section) for key in all_keys() if key.types]
    for path, section in sections:
        if (path, section) in seen:
            continue
        seen.add((path, section))
        prefix = f"{path}." if path else ""
        rows += [
            f"| `{prefix}{old}` | read as `{prefix}{new}`, with a warning |" for old, new in section.renamed.items()
        ]
        rows += [f"| `{prefix}{old}` | left out with a warning: {reason} |" for old, reason in section.dropped.items()]
        rows += [f"| `{prefix}{old}` | refused: {instead} |" for old, instead in section.removed.items()]
    head = "## Old names, and keys that are gone\n\n`dsrun config migrate FILE` rewrites a file that has them.\n\n"
    return head + "| Key | What happens |\n|---|---|\n" + "\n".join(dict.fromkeys(rows)) + "\n"


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
