"""What a step of each optimizer costs on this CPU, and whether the ones that save memory learn as well.

    python scripts/bench/optimizers.py [--runs 9] [--steps 300] [--only Adam8bit ...] [--json FILE]

Steps: the example's GPT, 19M parameters wide, in flat shards as the engine has them on one rank, against the peers on
the model's own tensors, interleaved, one thread, least process time of all runs. Bytes are what a step has to move:
weights and states in and out, gradients in. Rows whose peer is not installed (bitsandbytes) have none.

Training: the example's own model and text, seeded, `--steps` updates, mean loss of the last 20. Optimizers that store
another one's states in fewer bytes are held to that one's loss; others are other methods, shown beside fp32 AdamW.
Takes about ten minutes on one idle core; `--steps 0` leaves training out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import dsrun
from dsrun.config.sections.optimizer import OPTIMIZERS
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.registry import factory_of
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.protocols import OwnedRange

#: What the project demands: speed of the fused step on shards beside torch's on tensors, loss beside fp32 AdamW, and
#: bytes of a pair of 8-bit states.
PART_OF_FUSED = 0.9
LOSS_WITHIN = 0.01
PAIR_BYTES = 2.1

NAMES = ("AdamW", "SGD", "Adagrad", "Lion", "Lamb", "AdamMini", "Adafactor", "Muon", "Adam8bit", "Lion8bit")
LEARNERS = ("AdamW", "Adam8bit", "AdamMini", "Adafactor", "Lamb", "Lion", "Lion8bit", "Muon")
#: Rates at which each learns the example well; AdamW's is the example's own.
RATES = {"Lion": 1e-4, "Lion8bit": 1e-4, "Adafactor": 1e-2, "Lamb": 1e-2, "Muon": 1e-2}
LAST = 20
#: What stores the states of another optimizer in fewer bytes, and must learn as it does.
STORED_SMALLER = {"Adam8bit": "AdamW", "Lion8bit": "Lion"}

Row = dict[str, Any]


def peers() -> dict[str, Callable[[Any], optim.Optimizer]]:
    """The origins that can step on this machine, by our name."""
    found: dict[str, Callable[[Any], optim.Optimizer]] = {
        "AdamW": lambda params: optim.AdamW(params, fused=True),
        "SGD": lambda params: optim.SGD(params, lr=1e-3, fused=True),
        "Adagrad": lambda params: optim.Adagrad(params, fused=True),
        "Adafactor": optim.Adafactor,
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes import optim as bits  # type: ignore[import-not-found]

        found |= {"Adam8bit": bits.Adam8bit, "Lion8bit": bits.Lion8bit}
    return found


def sharded(model: nn.Module, name: str) -> ShardOptimizer:
    """The optimizer over the model's tensors as flat units of one rank: blocks, and neighbours outside of them."""
    ranges: list[OwnedRange] = []
    tensors = [(key, param) for key, param in model.named_parameters()]
    for unit, members in groupby(tensors, key=lambda item: ".".join(item[0].split(".")[:2])):
        items = list(members)
        layout = lay_out(unit, [(key, tuple(param.shape)) for key, param in items], world_size=1)
        master, grad = torch.zeros(layout.padded_numel), torch.zeros(layout.padded_numel)
        for extent, (_, param) in zip(layout.extents, items, strict=True):
            part = slice(extent.offset, extent.offset + extent.numel)
            master[part] = param.detach().view(-1)
            assert param.grad is not None
            grad[part] = param.grad.view(-1)
        ranges.append(OwnedRange(layout, 0, master, grad, (0,) * len(items)))
    shards = ShardOptimizer(ranges, group_count=1)
    params = OPTIMIZERS.models[name].model_construct().model_dump()
    shards.drive(factory_of(name, params)([{"params": shards.shards_by_group()[0]}]))
    return shards


def time_steps(names: Sequence[str], make_model: Callable[[], nn.Module], *, runs: int) -> list[Row]:
    """Times every optimizer and its peer, interleaved; least process seconds of a step."""
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3
    numel = sum(param.numel() for param in model.parameters())
    rows: list[Row] = []
    available = peers()
    for name in names:
        ours = sharded(model, name)
        steps: dict[str, Callable[[], Any]] = {"ours": ours.step}
        if name in available:
            steps["peer"] = available[name](list(model.parameters())).step
        seconds = {label: float("inf") for label in steps}
        for run in range(runs + 1):
            for label, step in steps.items():
                started = time.process_time()
                step()
                if run:  # the first makes the states
                    seconds[label] = min(seconds[label], time.process_time() - started)
        state = sum(t.nbytes for t in ours.tensors() if t.ndim and t.dtype != torch.bfloat16)
        moved = numel * 12 + 2 * state
        rows.append(
            {
                "optimizer": name,
                "state bytes a parameter": state / numel,
                "ns a parameter": seconds["ours"] / numel * 1e9,
                "GB/s": moved / seconds["ours"] / 1e9,
                "peer ns a parameter": seconds["peer"] / numel * 1e9 if "peer" in seconds else None,
                "speed of peer's": seconds["peer"] / seconds["ours"] if "peer" in seconds else None,
            }
        )
    return rows


def learn(name: str, example: Any, *, steps: int, batch: int, data: Any, width: int = 192, layers: int = 5) -> float:
    """Trains the example's model; returns the mean loss of the last steps."""
    torch.manual_seed(1234)
    model = example.GPT(width=width, heads=width // 32, layers=layers, context=128)
    params: dict[str, Any] = {"lr": RATES.get(name, 1e-3), "weight_decay": 0.0}
    if name == "Muon":
        params["adam_lr"] = 1e-3
    engine, *_ = dsrun.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": name, "params": params},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": min(20, steps), "warmup_type": "linear"}},
        },
    )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(5))
    losses: list[float] = []
    for step in range(steps):
        chosen = [data[int(i)] for i in order[step * batch : (step + 1) * batch]]
        windows = torch.stack(chosen)
        logits: Tensor = engine(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def judge(rows: Sequence[Row], losses: dict[str, float]) -> list[tuple[str, bool]]:
    """The bars that what was measured can be held to."""
    by_name = {row["optimizer"]: row for row in rows}
    bars: list[tuple[str, bool]] = []
    if "AdamW" in by_name:
        part = by_name["AdamW"]["speed of peer's"]
        bars.append((f"AdamW on shards: {part:.2f} of torch fused, at least {PART_OF_FUSED}", part >= PART_OF_FUSED))
    if "Adam8bit" in by_name:
        size = by_name["Adam8bit"]["state bytes a parameter"]
        bars.append((f"Adam8bit: {size:.3f} bytes a pair, at most {PAIR_BYTES}", size <= PAIR_BYTES))
    for name, origin in STORED_SMALLER.items():
        if {name, origin} <= losses.keys():
            off = abs(losses[name] / losses[origin] - 1)
            bars.append((f"{name}: loss {off:.2%} off {origin}'s, at most {LOSS_WITHIN:.0%}", off <= LOSS_WITHIN))
    return bars


def losses_table(losses: dict[str, float], *, steps: int) -> str:
    """Returns a Markdown table of losses, each beside fp32 AdamW's and beside that of the optimizer it stores smaller.

    Args:
        losses: mean of the last steps, by optimizer.
        steps: updates that were taken.
    """
    lines = [
        f"| optimizer | rate | loss after {steps} updates | of AdamW's | of its origin's |",
        "|---|---|---|---|---|",
    ]
    for name, loss in losses.items():
        of_adam, of_origin = (
            f"{loss / losses[other] - 1:+.2%}" if other in losses and other != name else ""
            for other in ("AdamW", STORED_SMALLER.get(name, name))
        )
        lines.append(f"| {name} | {RATES.get(name, 1e-3):g} | {loss:.4f} | {of_adam} | {of_origin} |")
    return "\n".join(lines)


def load_example() -> Any:
    """The example's module, which is a script and no package."""
    path = Path(__file__).parents[1] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="timed steps of each optimizer")
    parser.add_argument("--width", type=int, default=512, help="of the model whose steps are timed")
    parser.add_argument("--steps", type=int, default=300, help="updates of training; 0 for none")
    parser.add_argument("--batch", type=int, default=8, help="samples of 128 bytes an update")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="these optimizers")
    parser.add_argument("--json", type=Path, help="also write the figures to a file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    example = load_example()
    rows = time_steps(
        args.only,
        lambda: example.GPT(width=args.width, heads=8, layers=6, context=128),
        runs=args.runs,
    )
    print(f"{'optimizer':<12}{'state B':>9}{'ns':>8}{'GB/s':>8}{'peer ns':>9}{'of peer':>9}   a parameter and step")
    for row in rows:
        shown = [row["peer ns a parameter"], row["speed of peer's"]]
        peer = "".join(f"{'-':>9}" if value is None else f"{value:9.2f}" for value in shown)
        own = f"{row['state bytes a parameter']:9.3f}{row['ns a parameter']:8.2f}{row['GB/s']:8.1f}"
        print(f"{row['optimizer']:<12}{own}{peer}")
    losses: dict[str, float] = {}
    if args.steps:
        data = example.TextWindows(example.read_text(None), 128)
        for name in (name for name in LEARNERS if name in args.only):
            losses[name] = learn(name, example, steps=args.steps, batch=args.batch, data=data)
        print(f"\n{losses_table(losses, steps=args.steps)}\n", flush=True)
    bars = judge(rows, losses)
    for text, met in bars:
        print(f"{'met' if met else 'MISSED'}: {text}")
    if args.json:
        args.json.write_text(json.dumps({"steps": rows, "losses": losses, "torch": torch.__version__}, indent=1))
    return 0 if all(met for _, met in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
