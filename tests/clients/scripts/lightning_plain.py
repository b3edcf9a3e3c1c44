"""What `lightning_fit.py --accumulation 2 --batch 2` on two ranks comes to, in a loop of torch alone.

Lightning divides the loss by the accumulation steps, and DeepSpeed's engine does so again.
"""

from __future__ import annotations

import json
import sys

import torch
from lightning_fit import Network, data


def main() -> None:
    network = Network()
    network.configure_model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))
    dataset = data(32)
    losses: list[float] = []
    for number in range(16):
        start = number * 4 % 32
        loss = network.loss([tensor[start : start + 4] for tensor in dataset.tensors])
        (loss / 4).backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    with open(sys.argv[1], "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    main()
