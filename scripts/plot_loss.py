"""Draws the loss of one or several runs from their records, in the order given, over the optimizer step."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path


def read_losses(path: Path) -> tuple[list[int], list[float]]:
    """Returns (steps, losses) of the step records in a file of JSON lines."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["event"] == "step" and record.get("loss") is not None]
    return [record["step"] for record in steps], [record["loss"] for record in steps]


def running_mean(values: list[float], window: int) -> list[float]:
    """Returns the mean of the last `window` values at each place, of fewer at the start."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def main() -> None:
    """Reads the records and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="records.jsonl of a run")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    args = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [read_losses(path) for path in args.records]
    for (_, earlier), (_, later) in pairwise(zip(args.records, runs, strict=True)):
        before, after = dict(zip(*earlier, strict=True)), dict(zip(*later, strict=True))
        both = before.keys() & after.keys()
        if both:
            difference = max(abs(before[step] - after[step]) for step in both)
            print(f"{len(both)} steps were taken by both runs; their losses differ by at most {difference:.1e}")

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    for number, path in enumerate(args.records, start=1):
        steps, losses = runs[number - 1]
        if not steps:
            parser.error(f"{path} holds no step")
        color = f"C{number - 1}"
        # Where runs overlap, the earlier one shows as a broad band under the later one.
        axes.plot(steps, losses, color=color, linewidth=2.6 if number < len(args.records) else 0.9, alpha=0.35)
        label = f"run {number}: steps {steps[0]} to {steps[-1]}, mean of the last 20"
        axes.plot(steps, running_mean(losses, 20), color=color, linewidth=1.6, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
