"""Whether memory grows or breaks up over many steps whose sequences have other lengths each time.

    python scripts/bench/fragmentation.py [--steps 1000] [--stages 0 1 2 3] [--ranks 1] [--seed 0]

Prints a Markdown table: for plain torch and for each ZeRO stage, memory of rank 0 in the first and the last tenth of
the run (medians of samples every few steps; the first steps warm up and are left out), and what its arenas hold. On
the CPU that is resident and anonymous memory of the process, with glibc told to give freed memory back at once: by
itself it keeps what activations of many sizes leave behind, and even plain torch grows by a quarter in such a run. On
CUDA it is what torch's allocator has reserved and what is allocated: their difference is the fragmentation.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.contract.environment import RankInfo
from dsrun.runtime.compat import TCPStore
from dsrun.units import format_bytes

VOCAB, WIDTH, LAYERS, LONGEST, SAMPLES = 512, 128, 4, 256, 2
#: Steps that are no part of any figure.
WARM_UP = 20
EVERY = 5
PLAIN = "plain torch"
#: mallopt(3): larger allocations are maps of their own, and the top of the heap goes back when it is free.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x_BTD = x_BTD + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes after one step: resident or reserved, anonymous or allocated, and of the arenas."""

    held: int
    used: int
    arenas: int
    holes: int


def look(device: torch.device, engine: Any) -> Sample:
    """Takes a sample."""
    arenas = [] if engine is None else list(engine.memory_arenas().arenas)
    ours = (sum(use.reserved_bytes for use in arenas), sum(use.hole_bytes for use in arenas))
    if device.type == "cuda":
        return Sample(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device), *ours)
    with open("/proc/self/smaps_rollup") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.rstrip().endswith("kB")}
    return Sample(sizes["Rss"], sizes["Anonymous"], *ours)


def train(stage: int | None, steps: int, seed: int) -> list[Sample]:
    """Trains at a stage, or plain torch, and returns the samples of this rank."""
    torch.manual_seed(seed)
    model = Model()
    engine: Any = None
    if stage is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        step = _plain_step(model.to(device))
    else:
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,
        }
        engine = dsrun.initialize(model=model, config=config)[0]
        device = engine.device
        step = _engine_step(engine)
    lengths = random.Random(seed)
    samples: list[Sample] = []
    for number in range(steps):
        step(torch.randint(VOCAB, (SAMPLES, lengths.randint(8, LONGEST) + 1), device=device))
        if number >= WARM_UP and number % EVERY == 0:
            samples.append(look(device, engine))
    if engine is not None:
        engine.destroy()
    return samples


def _loss(model: Callable[[Tensor], Tensor], tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def _plain_step(model: nn.Module) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens_BT: Tensor) -> None:
        _loss(model, tokens_BT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _engine_step(engine: Any) -> Callable[[Tensor], None]:
    def step(tokens_BT: Tensor) -> None:
        engine.backward(_loss(engine, tokens_BT))
        engine.step()

    return step


def run_rank(end: Connection, env: dict[str, str], stage: int | None, steps: int, seed: int) -> None:
    """Runs one rank in a process of its own and sends its samples."""
    os.environ.update(env)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        samples = train(stage, steps, seed)
    end.send(samples)


def measure(stage: int | None, ranks: int, steps: int, seed: int) -> list[Sample]:
    """Returns rank 0's samples of a fresh run."""
    context = multiprocessing.get_context("spawn")
    ranks = 1 if stage is None else ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[tuple[Any, Connection]] = []
    for rank in range(ranks):
        info = RankInfo(
            rank=rank,
            world_size=ranks,
            local_rank=rank,
            local_world_size=ranks,
            master_port=store.port,
            agent_store=True,
        )
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(theirs, info.to_env(), stage, steps, seed), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found = [end.recv() for _, end in started]
    for process, _ in started:
        process.join()
    return found[0]


def row(name: str, samples: Sequence[Sample]) -> str:
    """Returns a line of the table."""
    tenth = max(1, len(samples) // 10)

    def change(of: Callable[[Sample], int]) -> tuple[str, str]:
        first, last = (statistics.median(map(of, part)) for part in (samples[:tenth], samples[-tenth:]))
        return format_bytes(first), f"{(last - first) / first:+.2%}"

    held, used = change(lambda s: s.held), change(lambda s: s.used)
    sizes = {sample.arenas for sample in samples}
    arenas = " to ".join(format_bytes(size) for size in sorted({min(sizes), max(sizes)})) if max(sizes) else "none"
    holes = format_bytes(max(sample.holes for sample in samples))
    return f"| {name} | {held[0]} | {held[1]} | {used[0]} | {used[1]} | {arenas} | {holes} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    if words.steps < 10 * EVERY + WARM_UP:
        parser.error(f"--steps must be {10 * EVERY + WARM_UP} at least, for tenths of the run to hold samples")
    kinds = ("reserved", "allocated") if torch.cuda.is_available() else ("resident", "anonymous")
    print(f"{words.ranks} rank(s), {words.steps} steps of {SAMPLES} sequences of 8 to {LONGEST} tokens\n")
    print(f"| run | {kinds[0]} | growth | {kinds[1]} | growth | arenas | most holes |")
    print("|---|---|---|---|---|---|---|")
    os.environ.update(_GIVE_BACK)
    for stage in [None, *words.stages]:
        name = PLAIN if stage is None else f"stage {stage}"
        print(row(name, measure(stage, words.ranks, words.steps, words.seed)), flush=True)


if __name__ == "__main__":
    main()
