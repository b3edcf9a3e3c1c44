"""The figures of docs/scale.md: published speeds of thousands of GPUs beside what the plan predicts for them.

    python scripts/bench/scale_study.py             prints the page's tables
    python scripts/bench/scale_study.py --write     writes them into the page, and draws its picture
    python scripts/bench/scale_study.py --check     fails where page or picture are not what it would write
    python scripts/bench/scale_study.py --json      prints the figures that have bars
    python scripts/bench/scale_study.py --on-paper  counts 4,096 ranks, and what that took of time and memory

Nothing is measured, and nothing needs torch or a GPU. One number is fitted: the rate of kernels, to one row.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from scale_study_parts.on_paper import counted
from scale_study_parts.picture import Line, svg_of
from scale_study_parts.predictions import (
    PAPER_RANKS,
    fitted_flops,
    llama3,
    of_ranks,
    steps,
    tflops,
    titan,
    titan_flops,
)
from scale_study_parts.published import (
    H100_PEAK,
    LLAMA3,
    TITAN_1F1B,
    TITAN_CHUNKS,
    TITAN_INTERLEAVED,
    TITAN_LONG,
    TITAN_MICROS,
)

from dsrun.estimate.prediction import Prediction

_ROOT = Path(__file__).parents[2]
_PAGE, _PICTURE = _ROOT / "docs" / "scale.md", _ROOT / "docs" / "images" / "scale-405b.svg"
_GB = 1e9
_PARTS = {"tensor": "layers shared", "pipe": "between stages", "data": "kept equal"}


@cache
def _paper() -> Prediction:
    return of_ranks(PAPER_RANKS, gpu="H200-141G")


def _percent(found: float, published: float) -> str:
    return f"{found / published - 1:+.1%}".replace("%", " %")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Tables


def llama3_table() -> str:
    """Returns the rows of Llama 3: the first gives the rate, the others are predicted."""

    def rows() -> Iterator[tuple[str, ...]]:
        for row in LLAMA3:
            found = llama3(row, fitted_flops())
            assert found.pipeline is not None
            assert found.step.seconds is not None
            predicted = f"{tflops(found):.1f}"
            yield (
                f"{row.ranks:,}",
                f"t 8, c {row.context}, p 16, d {row.data}",
                f"{row.sequence:,}",
                str(row.samples),
                f"{row.tflops:.0f}",
                f"{predicted} (fitted)" if row is LLAMA3[0] else predicted,
                "" if row is LLAMA3[0] else _percent(tflops(found), row.tflops),
                f"{found.pipeline.bubble:.1%}".replace("%", " %"),
                f"{found.step.seconds:.1f}",
            )

    head = ("GPUs", "layout", "tokens", "M", "published TFLOP/s", "predicted", "off by", "bubble", "step s")
    return _table(head, rows())


def titan_ratio(micros: int, chunks: int) -> float:
    """Returns the speed of the interleaved schedule over that of 1F1B.

    Args:
        micros: micro batches of 32 samples.
        chunks: chunks of a rank under the interleaved schedule.
    """
    flops = fitted_flops()
    plain = titan(TITAN_1F1B, micros=micros, chunks=1, flops=flops)
    return titan(TITAN_INTERLEAVED, micros=micros, chunks=chunks, flops=flops) / plain


def titan_table() -> str:
    """Returns torchtitan's ratio for each reading of what its tables leave open."""
    published = TITAN_INTERLEAVED.tokens / TITAN_1F1B.tokens

    def rows() -> Iterator[tuple[str, ...]]:
        for micros in (8, 16, 32):
            for chunks in (2, 4):
                ratio = titan_ratio(micros, chunks)
                default = (micros, chunks) == (TITAN_MICROS, TITAN_CHUNKS)
                words = "what the commit takes by itself" if default else ""
                yield str(micros), str(chunks), f"{published:.2f}", f"{ratio:.3f}", _percent(ratio, published), words

    return _table(("M", "v", "published", "predicted", "off by", ""), rows())


def long_table() -> str:
    """Returns torchtitan's rows with long sequences, at the rate of its 1F1B row."""
    flops = titan_flops(TITAN_1F1B, micros=TITAN_MICROS, chunks=1)

    def rows() -> Iterator[tuple[str, ...]]:
        for row in TITAN_LONG:
            found = titan(row, micros=TITAN_MICROS, chunks=1, flops=flops)
            ranks = f"t 8, p 8, c {row.context}, d {8 // row.context}"
            yield f"{row.sequence:,}", ranks, f"{row.tokens:.0f}", f"{found:.0f}", _percent(found, row.tokens)

    return _table(("tokens", "layout", "published tokens/s a GPU", "predicted", "off by"), rows())


def bytes_table() -> str:
    """Returns what a rank of 4,096 moves over each axis in an update."""
    found = _paper()
    seconds = {path.path: path.seconds for path in found.paths}

    def rows() -> Iterator[tuple[str, ...]]:
        for axis in sorted(found.traffic.axes, key=lambda axis: -axis.sent_bytes):
            kinds = ", ".join(f"{kind} {size / _GB:,.1f}" for kind, size in axis.buffers.items())
            where = "network" if axis.crosses_hosts else "NVLink"
            yield _PARTS[axis.name], str(axis.ranks), kinds, f"{axis.sent_bytes / _GB:,.1f}", where

    times = ", ".join(f"{_PARTS[name]} {seconds[name]:.1f} s" for name in _PARTS)
    table = _table(("what", "ranks", "buffers, GB", "sent, GB", "over"), rows())
    return f"{table}\n\nTime that this takes at the links' speeds: {times}."


def paper_text() -> str:
    """Returns the step of 4,096 H200."""
    found, both = _paper(), steps(_paper())
    assert found.step.seconds is not None
    assert found.pipeline is not None
    rows = [
        ("step", f"{found.step.seconds:.1f} s"),
        ("TFLOP/s a GPU, MFU", f"{tflops(found):.0f}, {tflops(found) * 1e12 / H100_PEAK:.1%}".replace("%", " %")),
        ("bubble", f"{found.pipeline.bubble:.1%}".replace("%", " %")),
        ("closed form of the step", f"{both.formula:.2f} s"),
        ("simulated from dsrun's own actions", f"{both.simulated:.2f} s ({_percent(both.simulated, both.formula)})"),
        (
            "the same, with the time of each message",
            f"{both.with_messages:.2f} s ({_percent(both.with_messages, both.formula)})",
        ),
        ("model state of a rank", f"{found.state.total / _GB:.1f} GB"),
        ("most of a rank, nothing recomputed", f"{max(found.stage_bytes) / _GB:.0f} GB of 141 GB: **it does not fit**"),
    ]
    return _table(("what", "figure"), iter(rows))


def picture() -> str:
    """Returns TFLOP/s a GPU over ranks, for 16.8M tokens in an update."""
    usual, long = LLAMA3[:2], LLAMA3[2:]
    lines = [
        Line(
            "8,192 tokens: t 8, p 16",
            [(ranks, tflops(of_ranks(ranks))) for ranks in (1024, 2048, 4096, 8192, 16384)],
            [(row.ranks, row.tflops) for row in usual],
        ),
        Line(
            "131,072 tokens: t 8, c 16, p 16",
            [(ranks, tflops(of_ranks(ranks, sequence=131072, context=16))) for ranks in (2048, 4096, 8192, 16384)],
            [(row.ranks, row.tflops) for row in long],
        ),
    ]
    title = "Llama 3 405B on H100, 16.8M tokens in an update, predicted from the 430 at 8,192"
    return svg_of(lines, title=title, unit="TFLOP/s a GPU")


TABLES = {
    "llama3": llama3_table,
    "titan": titan_table,
    "long": long_table,
    "4096": paper_text,
    "bytes": bytes_table,
    "rate": lambda: f"Rate of kernels that the first row gives: {fitted_flops() / 1e12:.0f} TFLOP/s.",
}


# The page


def page(text: str) -> str:
    """Returns the page with its tables made anew: each stands between `<!-- NAME -->` and `<!-- end -->`.

    Args:
        text: the page as it is.
    """

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found['name']} -->\n{TABLES[found['name']]()}\n<!-- end -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def figures() -> dict[str, Any]:
    """Returns the figures that have bars."""
    both = steps(_paper())
    return {
        "llama3": [tflops(llama3(row, fitted_flops())) / row.tflops for row in LLAMA3],
        "titan": titan_ratio(TITAN_MICROS, TITAN_CHUNKS) / (TITAN_INTERLEAVED.tokens / TITAN_1F1B.tokens),
        "simulated": both.simulated / both.formula,
        "mfu": tflops(_paper()) * 1e12 / H100_PEAK,
    }


def main() -> int:
    """Does what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="write tables and picture")
    choice.add_argument("--check", action="store_true", help="fail where they are stale")
    choice.add_argument("--json", action="store_true", help="print the figures that have bars")
    choice.add_argument("--on-paper", action="store_true", help="count 4,096 ranks")
    options = parser.parse_args()
    if options.on_paper or options.json:
        print(json.dumps(counted() if options.on_paper else figures(), indent=1))
        return 0
    if not options.write and not options.check:
        print("\n\n".join(make() for make in TABLES.values()))
        return 0
    written = {_PAGE: page(_PAGE.read_text(encoding="utf-8")), _PICTURE: picture()}
    if options.write:
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in written.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(_ROOT)} is stale: python scripts/bench/scale_study.py --write", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
