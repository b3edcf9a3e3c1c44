"""Draws the loss of one or several runs from their records, in the order given, over the optimizer step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def read_losses(path: Path) -> tuple[list[int], list[float]]:
    """Returns (steps, losses) of the step records in a file of JSON lines."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    return [record["step"] for record in steps], [record["loss"] for record in steps]


def main() -> None:
    """Reads the records and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="records.jsonl of a run")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    args = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    for number, path in enumerate(args.records, start=1):
        steps, losses = read_losses(path)
        axes.plot(steps, losses, linewidth=1.4, label=f"run {number}: steps {steps[0]} to {steps[-1]}")
        axes.plot(steps[0], losses[0], "o", markersize=5, color=axes.lines[-1].get_color())
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
