"""Writes docs/reference/deepspeed-api.md, from the tables that the tests hold dsrun to.

    python scripts/deepspeed_api.py

Names stand in tests/support/deepspeed_names.py and deepspeed_engine.py; reasons for names that are not there are those
that the errors give. What is true of many names at once is said here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from dsrun import deepspeed_missing
from dsrun.as_deepspeed.version import STANDARD
from dsrun.runtime.engine.deepspeed import missing as engine_missing
from support import deepspeed_engine
from support.deepspeed_names import ABSENT, KNOWN, ROWS, Row

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "deepspeed-api.md"

#: More constants than this are counted and not listed.
_MANY = 4

_HEAD = """\
# Names that scripts written for DeepSpeed use

What dsrun has of DeepSpeed {version}'s interface, by the names in scripts, and what it does not have. A script gets at
it in two ways: `dsrun --as-deepspeed train.py` leaves it as it is ([guide](../guides/deepspeed-scripts.md)), or it has
`import dsrun as deepspeed`. A name that is not here raises `AttributeError` or `ImportError` and says what to use
instead, so `hasattr` tells the truth.

This page is made by `python scripts/deepspeed_api.py` from the table that the tests read.
"""

_PACKAGE = """\
## The package
{count} names: all that transformers, accelerate, trl and peft use, and {share} of those that Lightning and kits for
fine-tuning and reinforcement learning do. Parameters have DeepSpeed's names and order; those that are not taken are
named. A name that stands in several modules is one object.

### In both ways
With `import dsrun as deepspeed`, the names stand in the module that is named first.
"""

_FACE = """\
### With `--as-deepspeed`
"""

_ENGINE = """\
## The engine
"""

_AFTER_ENGINE = """\
A backward of the script's own (`loss.backward()`, `output.backward(gradient)`) counts at every stage, 0 too. It is
divided by the accumulation steps where gradients are added up, so engines that feed each other each divide once; under
fp16 the loss comes from `engine.scale`. `create_graph=True` is refused; what another engine's `backward` gives the
model does not count. Once nothing refers to the engine any more, a backward is refused: its gradients would be lost. On
a GPU an engine's forward leaves autograd's threads off in its thread, for all later backwards there.

`torch.nn.utils.clip_grad_norm_` over `engine.module.parameters()` returns 0.0 and clips nothing, for `param.grad` is
None after `backward`: set `gradient_clipping` in the config. `runtime.utils.clip_grad_norm_` of drop-in mode clips what
the engine keeps.

## Parameters
At stage 3 parameters have `ds_id`, `ds_status`, `ds_shape`, `ds_numel`, `ds_tensor`, `ds_persist`, `partition_numel()`
and `ds_active_sub_modules`, which is empty. At the other stages they have none of them, as code that asks
`hasattr(param, "ds_id")` expects. `param.ds_tensor.data = ...` is refused where it is other memory:
`engine.offload_states()` moves states off the device.

## The optimizer
It is a torch optimizer, and has `overflow`, `cur_scale`, `loss_scale`, `offload_states` and `reload_states`; at stage 3
also a `parameter_offload` without hooks, which TRL takes off and puts on again. With `--as-deepspeed` its own `step()`
does what `engine.step()` does, but for the schedule.
"""

_MISSING = """\
## What is not here and why
A module's reason is that of all below it. Constants, and classes and functions that only DeepSpeed's own code calls,
are not listed one by one.
"""


def page() -> str:
    """Returns the page as Markdown."""
    there = sum(known.tier == 2 for known in KNOWN)
    share = f"{100 * there // (there + sum(tier == 2 for tier in ABSENT.values()))} %"
    own = [row for row in ROWS if row.is_own()]
    parts = [
        _HEAD.format(version=STANDARD),
        _PACKAGE.format(count=len(KNOWN), share=share),
        _table(("module", "names", "what differs"), _package_rows(own)),
        _FACE,
        _table(("module", "names", "what differs"), _package_rows(row for row in ROWS if row not in own)),
        _ENGINE,
        _table(
            ("name", "what differs"),
            ((_code(row.names), _remark(row.differs, row.lacks)) for row in deepspeed_engine.ROWS),
        ),
        _AFTER_ENGINE,
        _MISSING,
        _table(("name", "reason, and what to use instead"), _reasons(deepspeed_missing.REASONS)),
        "Of the engine:\n",
        _table(("name", "reason, and what to use instead"), _reasons(engine_missing.REASONS)),
    ]
    return "\n".join(parts)


def _package_rows(rows: Iterable[Row]) -> Iterator[tuple[str, str, str]]:
    """Yields the cells of a line for the names of each group of modules that have the same remark."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=Row.modules_in_order):
        modules = " ".join("deepspeed" if module == "." else module for module in row.modules_in_order())
        names = [entry.partition("=")[0] for entry in row.names.split()]
        lines.setdefault((_code(modules), _remark(row.differs, row.lacks)), []).extend(names)
    for (modules, remark), names in lines.items():
        yield modules, _listed(names), remark


def _listed(names: list[str]) -> str:
    """Returns the names; of many constants, how many there are."""
    constants = [name for name in names if name.isupper()]
    if len(constants) <= _MANY:
        return _code(" ".join(names))
    others = _code(" ".join(name for name in names if name not in constants))
    return f"{others}, {len(constants)} constants" if others else f"{len(constants)} constants"


def _reasons(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason, names in reasons.items():
        yield _code(names), reason


def _remark(differs: str, lacks: str) -> str:
    return "; ".join(part for part in (differs, f"without {_code(lacks)}" if lacks.strip("*") else "") if part)


def _code(names: str) -> str:
    return ", ".join(
        f"the rest of `{name.removesuffix('.*')}`" if name.endswith(".*") else f"`{name}`" for name in names.split()
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
