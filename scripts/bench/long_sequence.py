"""Bytes and seconds of the long-sequence functions beside the plain computations, with their formulas.

    python scripts/bench/long_sequence.py [--rounds 9] [--tokens 1024] [--device cpu]

A row is a forward and a backward of one loss, one MLP, or one call of attention. Bytes: the most above what is there
before: on the CPU everything that torch's allocator hands out, as its profiler sees it; on CUDA its own peak. Formulas:
docs/guides/long-sequences.md, without the scratch memory of attention's threads. Seconds: on the CPU process time of
one thread; on CUDA until the device is done. Rows come in turn in each round, and ratios are of the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rounds import Rows
from torch import Tensor, nn

from dsrun.choices.attention_kernels import AttentionCall, kernel_bytes
from dsrun.long_sequence import attention, linear_cross_entropy, tiled
from dsrun.runtime.long_sequence.attention import choice_for
from dsrun.runtime.long_sequence.loss_kernels import loss_bytes, tokens_at_a_time
from dsrun.runtime.long_sequence.loss_libraries import installed

WIDTH, VOCAB, HEADS = 256, 8192, 8
_MIB = 1 << 20
_Step = Callable[[], object]


def losses(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, _Step], dict[str, int]]:
    """Returns steps of the loss by kernel, and the bytes that formulas say."""
    hidden = torch.randn(tokens, WIDTH, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, device=device) * 0.05).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,), device=device)

    def plain() -> object:
        loss = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        return torch.autograd.grad(loss, (hidden, weight))

    def by(kernel: Any) -> _Step:
        return lambda: torch.autograd.grad(
            linear_cross_entropy(hidden, weight, targets, kernel=kernel), (hidden, weight)
        )

    names = ["chunks", *(name for name, there in installed().items() if there)]
    steps = {name: by(name) for name in names if name != "liger" or device.type == "cuda"}
    size = dtype.itemsize
    chunk = tokens_at_a_time(tokens, WIDTH, VOCAB)
    taken = loss_bytes(tokens, WIDTH, VOCAB, size=size, chunk=chunk)
    expected = {"whole logits": tokens * VOCAB * 12, "chunks": max(taken.forward, 2 * taken.kept)}
    return {"whole logits": plain, **steps}, expected


def mlps(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, _Step], dict[str, int]]:
    """Returns steps of an MLP of four times its width, plain and by tiles of its width."""
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device, dtype)
    x = torch.randn(1, tokens, WIDTH, device=device).to(dtype).requires_grad_()
    params = list(mlp.parameters())

    def step(call: Callable[[], Tensor]) -> _Step:
        return lambda: torch.autograd.grad(call().sum(), (x, *params))

    steps = {"plain": step(lambda: mlp(x))}
    steps |= {f"tiles of {size}": step(lambda s=size: tiled(mlp, x, tile_size=s)) for size in (WIDTH // 4, WIDTH)}
    return steps, {}


def attentions(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, _Step], dict[str, int]]:
    """Returns steps of causal attention by every kernel that can take it here."""
    width = WIDTH // HEADS
    q, k, v = (
        torch.randn(1, tokens, HEADS, width, device=device).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    call = AttentionCall(
        batch=1,
        heads=HEADS,
        kv_heads=HEADS,
        queries=tokens,
        keys=tokens,
        head_dim=width,
        dtype="fp32" if dtype == torch.float32 else "bf16",
        device_type=device.type,
        causal=True,
    )
    grad = torch.ones_like(q)
    steps: dict[str, _Step] = {}
    expected: dict[str, int] = {}
    for kernel in choice_for(q, k, v, causal=True).able:
        steps[kernel] = lambda name=kernel: torch.autograd.grad(
            attention(q, k, v, causal=True, kernel=name), (q, k, v), grad
        )
        held = kernel_bytes(kernel, call)
        inputs = sum(tensor.nbytes for tensor in (q, k, v))
        made = held.kept - inputs  # the inputs of fused kernels are there before; of math they stand for its copies
        expected[kernel] = max(held.forward, (held.kept if kernel == "math" else made) + held.backward)
    return steps, expected


def peak_bytes(step: _Step, device: torch.device) -> int:
    """Returns the most that one step holds above what is there before it."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    # Without it torch warns that the events of earlier cycles are cleared; there is one.
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as seen:
        step()
    raw: Any = seen.profiler
    held = most = 0
    events = [event for event in raw.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def timed(step: _Step, device: torch.device) -> float:
    """Returns seconds: of the process on the CPU, until all is done on CUDA."""
    if device.type != "cuda":
        started_s = time.process_time()
        step()
        return time.process_time() - started_s
    torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def bytes_table(steps: Mapping[str, _Step], expected: Mapping[str, int], device: torch.device) -> str:
    """Returns a Markdown table of peaks beside formulas."""
    lines = ["| | measured MiB | formula MiB |", "|---|---|---|"]
    for name, step in steps.items():
        formula = f"{expected[name] / _MIB:.1f}" if name in expected else ""
        lines.append(f"| {name} | {peak_bytes(step, device) / _MIB:.1f} | {formula} |")
    return "\n".join(lines)


def seconds_table(steps: Mapping[str, _Step], rounds: int, device: torch.device) -> str:
    """Returns a Markdown table of seconds, with ratios to the first row."""
    rows = Rows(rounds)
    for round_ in rows.rounds():
        for name, step in steps.items():
            rows.add(name, timed(step, device) * 1e3, round_)
    return rows.table("ms", {}, ratio_to=next(iter(steps)))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = Path("/proc/loadavg").read_text(encoding="utf-8").split()[0]
    print(f"{args.tokens} tokens, width {WIDTH}, vocabulary {VOCAB}, torch {torch.__version__}, load {load}")
    for title, make in (("loss", losses), ("MLP", mlps), ("attention", attentions)):
        for dtype in (torch.float32, torch.bfloat16):
            steps, expected = make(args.tokens, dtype, args.device)
            print(f"\n{title}, {str(dtype).removeprefix('torch.')}\n\n{bytes_table(steps, expected, args.device)}")
            print(f"\n{seconds_table(steps, args.rounds, args.device)}")


if __name__ == "__main__":
    main()
