"""DeepSpeed's step on the host, in a process of its own: `python deepspeed_step.py NUMEL THREADS SCALE`.

Gradients are on the host in fp32, as DeepSpeed has the GPU widen them; then what ZeRO-Offload does at a step: a pass
that scales them, DeepSpeedCPUAdam, and a pass that rounds the weights to bf16. Says one line when it is ready, and for
each line on stdin takes a step and answers with its seconds, then a few weights. The end of stdin ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time

# What the libraries print goes to stderr: stdout is for answers.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def main() -> None:
    """Answers until stdin ends."""
    numel, threads, scale = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(numel, generator=draw))
    gradient = torch.randn(numel, generator=draw).bfloat16().float()
    weights.grad = gradient.clone()
    params = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([weights], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    print(json.dumps("ready"), file=_ANSWERS, flush=True)
    for _ in sys.stdin:
        weights.grad.copy_(gradient)
        began_s = time.perf_counter()
        weights.grad.mul_(scale)
        optimizer.step()
        params.copy_(weights.detach())
        took_s = time.perf_counter() - began_s
        print(json.dumps([took_s, weights.detach()[:8].tolist()]), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    main()
