"""Peak activation bytes of a 12-block GPT by policy, beside their formulas, and what recomputation costs in time.

    python scripts/bench/activations.py [--rounds 15] [--peer-python PYTHON] [--disk FOLDER]

Bytes: everything that torch's CPU allocator hands out in a forward and backward of the blocks alone, as its profiler
sees it; parameters, their gradients, the first input and the ring in host memory are there before. Formulas: see
docs/guides/activations.md. Seconds: process time of one thread, policies in turn in each round; ratios are of the same
round. torch.utils.checkpoint is measured in every run; DeepSpeed's checkpointing by a python that has torch and
deepspeed, which gets this very file. `--disk` also measures inputs that go on to a file in that folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LAYERS = 12
HEADS = 4
#: What the project demands: peak bytes within this share of the formula, and full recomputation at most this much
#: above the ratio of flops, 8/6.
BYTES_BAR = 0.05
SECONDS_BAR = 1.05 * 8 / 6


@dataclass(frozen=True, slots=True)
class Size:
    """Of a measured model: width, samples and tokens a sample; fp32."""

    width: int
    samples: int
    context: int

    @property
    def tokens(self) -> int:
        """Of a micro batch."""
        return self.samples * self.context

    @property
    def input_bytes(self) -> int:
        """Of a block's input."""
        return self.tokens * self.width * 4

    @property
    def block_bytes(self) -> int:
        """What a block saves: 16 times its width a token, and the statistics of two norms and of attention."""
        return 16 * self.input_bytes + self.tokens * (4 + HEADS) * 4

    @property
    def working_bytes(self) -> int:
        """Gradients in a block's backward when most is held: of the widest state, and of a matrix to it."""
        return 4 * self.input_bytes + 4 * self.width**2 * 4


class Block(nn.Module):
    """Pre-norm attention and MLP, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x_BTD`."""
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x_BTD = x_BTD + self.out(a)
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Blocks(nn.Module):
    """The blocks of a GPT; `call` makes the calls of them."""

    def __init__(self, width: int, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """Runs all blocks."""
        for block in self.blocks:
            x = self.call(block, x)
        return x


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    """An ordinary call."""
    return block(x)


def by_torch(block: nn.Module, x: Tensor) -> Tensor:
    """The peer in torch."""
    made: Any = checkpoint(block, x, use_reentrant=False)
    return made


def by_deepspeed(block: nn.Module, x: Tensor) -> Tensor:
    """The peer in DeepSpeed."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    return deepspeed.checkpointing.checkpoint(block, x)  # pyright: ignore


def make(size: Size, call: Callable[[nn.Module, Tensor], Tensor] = plainly) -> Callable[[], None]:
    """Returns a function that runs forward and backward of a new model; its gradients are there already."""
    return stepper(Blocks(size.width, call), size)


def stepper(model: nn.Module, size: Size) -> Callable[[], None]:
    """Returns a function that runs forward and backward."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    x = torch.randn(size.samples, size.context, size.width, requires_grad=True)
    x.grad = torch.zeros_like(x)
    grad = torch.ones_like(x)

    def step() -> None:
        model(x).backward(grad)

    return step


def make_ours(size: Size, **keys: Any) -> Callable[[], None]:
    """Returns the same of a model whose blocks dsrun treats as the config's section says."""
    from dsrun.config.sections.activation import ActivationCheckpointing
    from dsrun.runtime.activation.activate import activate
    from dsrun.runtime.activation.recompute.rng import RngTracker

    model = Blocks(size.width, plainly)
    section = ActivationCheckpointing.model_validate(keys)
    activate(model, section, skip=lambda _: False, script_chooses=False, tracker=RngTracker(), say=print)
    return stepper(model, size)


def peak_bytes(step: Callable[[], None]) -> int:
    """Returns the most bytes that one step holds above what is there before it; the ring settles in two."""
    step()
    step()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # Without it torch warns that the events of earlier cycles are cleared; there is one.
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as seen:
        step()
    raw: Any = seen.profiler
    events = [e for e in raw.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def formulas(size: Size, disk: str | None) -> dict[str, tuple[dict[str, Any], float]]:
    """Returns for each row the section's keys and the bytes of the formula."""
    one, block, working = size.input_bytes, size.block_bytes, size.working_bytes
    segments = math.ceil(math.sqrt(LAYERS))
    # Of the matrix products' results, all but two widths are what a block saves anyway.
    kept = 10 * one + size.tokens * HEADS * 4
    shared = 8 * one + size.tokens * HEADS * 4
    packed = one / 4 * (1 + 4 / 128)
    rows: dict[str, tuple[dict[str, Any], float]] = {
        "none": ({"policy": "none"}, LAYERS * block + working),
        "every block": ({"policy": "every_block"}, LAYERS * one + block - one + working),
        "sqrt": ({"policy": "sqrt"}, segments * one + LAYERS / segments * block - one + working),
        "hierarchical": (
            {"policy": "hierarchical"},
            (segments + LAYERS / segments - 1) * one + block - one + working,
        ),
        "selective": ({"policy": "selective"}, LAYERS * (one + kept) + block - one - shared + working),
        "inputs on the CPU": ({"cpu_checkpointing": True}, 2 * one + block + working),
        "inputs in int8": ({"packing": "int8"}, LAYERS * packed + one + block + working),
    }
    if disk is not None:
        rows["inputs on a disk"] = ({"cpu_checkpointing": True, "nvme_path": [disk]}, 2 * one + block + working)
    return rows


def bytes_table(size: Size, disk: str | None) -> str:
    """Returns a Markdown table of peak bytes beside formulas, peers below."""
    lines = ["| policy | formula MiB | measured MiB | measured / formula | bar |", "|---|---|---|---|---|"]
    for name, (keys, formula) in formulas(size, disk).items():
        found = peak_bytes(make_ours(size, **keys))
        ratio = found / formula
        verdict = "met" if abs(ratio - 1) <= BYTES_BAR else "**not met**"
        lines.append(f"| {name} | {formula / 2**20:.1f} | {found / 2**20:.1f} | {ratio:.3f} | within 5 %: {verdict} |")
    found = peak_bytes(make(size, by_torch))
    lines.append(f"| torch.utils.checkpoint, every block | | {found / 2**20:.1f} | | |")
    return "\n".join(lines)


def seconds_table(size: Size, rounds: int, disk: str | None) -> str:
    """Returns a Markdown table of seconds by policy."""
    from rounds import Bar, Rows

    steps = {
        "none": make(size),
        "every block": make_ours(size, policy="every_block"),
        "sqrt": make_ours(size, policy="sqrt"),
        "hierarchical": make_ours(size, policy="hierarchical"),
        "selective": make_ours(size, policy="selective"),
        "inputs on the CPU": make_ours(size, cpu_checkpointing=True),
        "inputs in int8": make_ours(size, packing="int8"),
        "torch.utils.checkpoint, every block": make(size, by_torch),
        "torch.utils.checkpoint, all of a block run again": make(size, _to_the_end),
    }
    if disk is not None:
        steps["inputs on a disk"] = make_ours(size, cpu_checkpointing=True, nvme_path=[disk])
    rows = Rows(rounds)
    for round_ in rows.rounds():
        for name, step in steps.items():
            rows.add(name, timed(step) * 1e3, round_)
    bars = {"every block": [Bar(SECONDS_BAR, "none"), Bar(1.02, "torch.utils.checkpoint, every block")]}
    return rows.table("ms", bars, ratio_to="none")


def _to_the_end(block: nn.Module, x: Tensor) -> Tensor:
    made: Any = checkpoint(block, x, use_reentrant=False, early_stop=False)
    return made


def timed(step: Callable[[], None]) -> float:
    """Returns seconds of process time."""
    started_s = time.process_time()
    step()
    return time.process_time() - started_s


def run_peer(python: str, memory: Size, speed: Size, rounds: int) -> str:
    """Runs this file below another python; returns what it says of DeepSpeed's checkpointing."""
    given = json.dumps([[s.width, s.samples, s.context] for s in (memory, speed)])
    words = [python, __file__, "--as-deepspeed", given, "--rounds", str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    answer = [line for line in done.stdout.splitlines() if line.startswith("| DeepSpeed")]
    return "\n".join(answer) or f"DeepSpeed's checkpointing did not run: {done.stderr.strip()[-300:]}"


def be_deepspeed(given: str, rounds: int) -> None:
    """Measures DeepSpeed's checkpointing beside no checkpointing, in turn."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed  # pyright: ignore[reportMissingImports]

    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")  # pyright: ignore
    deepspeed.checkpointing.configure(None)  # pyright: ignore
    memory, speed = (Size(*numbers) for numbers in json.loads(given))
    found = peak_bytes(make(memory, by_deepspeed))
    plain, theirs = make(speed), make(speed, by_deepspeed)
    ratios: list[float] = []
    for round_ in range(rounds + 1):
        seconds, again = timed(plain), timed(theirs)
        ratios += [again / seconds] if round_ else []
    middle = sorted(ratios)[len(ratios) // 2]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"| DeepSpeed {deepspeed.__version__}, every block: {found / 2**20:.1f} MiB, x none {middle:.2f} ({spread}) |"
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--peer-python", default=os.environ.get("DSRUN_PEER_PYTHON"), help="has DeepSpeed; also $DSRUN_PEER_PYTHON"
    )
    parser.add_argument("--disk", help="a folder on a local drive")
    size = {"nargs": 3, "type": int, "metavar": ("WIDTH", "SAMPLES", "TOKENS")}
    parser.add_argument("--memory", default=(128, 8, 512), help="size whose bytes are measured", **size)
    parser.add_argument("--speed", default=(512, 2, 256), help="size whose seconds are measured", **size)
    parser.add_argument("--as-deepspeed", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory, speed = Size(*args.memory), Size(*args.speed)
    if args.as_deepspeed:
        be_deepspeed(args.as_deepspeed, args.rounds)
        return
    print(f"{LAYERS} blocks, fp32, torch {torch.__version__}, {Path('/proc/loadavg').read_text().split()[0]} load")
    print(f"\nwidth {memory.width}, {memory.tokens} tokens\n\n{bytes_table(memory, args.disk)}")
    seconds = seconds_table(speed, args.rounds, args.disk)
    print(f"\nwidth {speed.width}, {speed.tokens} tokens, {args.rounds} rounds\n\n{seconds}")
    if args.peer_python:
        print(f"\n{run_peer(args.peer_python, memory, speed, args.rounds)}")


if __name__ == "__main__":
    main()
