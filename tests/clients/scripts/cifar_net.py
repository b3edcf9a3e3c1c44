"""Trains a small convolutional network on images made up here, in the manner of DeepSpeed's CIFAR example.

cifar_net.py --deepspeed --deepspeed_config ds.json --out FILE
cifar_net.py --plain --out FILE          torch alone, in one process
"""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 8, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.out = nn.Linear(8 * 5 * 5, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pool(torch.relu(self.first(images)))
        hidden = self.pool(torch.relu(self.second(hidden)))
        return self.out(hidden.flatten(1))


def images() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(32) % 10
    shifted = torch.randn(32, 3, 32, 32, generator=draw) + labels[:, None, None, None] / 5
    return TensorDataset(shifted, labels, torch.arange(32))


def plain(seen: list[list[int]], net: Net) -> dict[str, object]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.01)
    losses: list[float] = []
    for places in seen:
        inputs, labels, _ = images()[places]
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def trained(args: argparse.Namespace, net: Net) -> dict[str, object]:
    deepspeed.init_distributed()
    get_accelerator().set_device(args.local_rank)
    parameters = {"params": [param for param in net.parameters() if param.requires_grad], "name": "parameters"}
    parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=images()
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else None
    losses: list[float] = []
    seen: list[list[int]] = []
    for inputs, labels, places in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        loss = nn.functional.cross_entropy(engine(inputs if dtype is None else inputs.to(dtype)).float(), labels)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / deepspeed.comm.get_world_size())
        everywhere = [torch.empty_like(places) for _ in range(deepspeed.comm.get_world_size())]
        deepspeed.comm.all_gather(everywhere, places)
        seen.append(torch.cat(everywhere).tolist())
    engine.eval()
    with torch.no_grad():
        right = sum((engine(each[None].to(device)).argmax() == label).item() for each, label, _ in images())
    return {"losses": losses, "seen": seen, "updates": engine.global_steps, "right": right}


def refused() -> str:
    try:
        from deepspeed.moe.layer import MoE
    except ImportError as error:
        return str(error)
    return str(MoE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", help="facts of a run on ranks")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--out", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(5)
    net = Net()
    if args.plain:
        with open(args.plain) as file:
            facts = plain(json.load(file)["seen"], net)
    else:
        facts = trained(args, net)
    if args.moe:
        facts["refused"] = refused()
    if args.plain or deepspeed.comm.get_rank() == 0:
        with open(args.out, "w") as file:
            json.dump(facts, file)


if __name__ == "__main__":
    main()
