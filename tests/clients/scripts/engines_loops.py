"""Several engines in one loop: a GAN of two that feed each other, and four of a policy's training.

engines_loops.py --out FILE              on ranks
engines_loops.py --plain --out FILE      torch alone, in one process
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

#: Stage of each network's engine; those without a rate only evaluate.
STAGES = {"generator": 2, "critic_of_images": 3, "actor": 3, "critic": 2, "reference": 3, "reward": 0}
RATES = {"generator": 0.01, "critic_of_images": 0.01, "actor": 0.02, "critic": 0.05}


class Plain(nn.Module):
    """A network with an engine's calls."""

    def __init__(self, module: nn.Module, rate: float | None) -> None:
        super().__init__()
        self.module, self.global_steps = module, 0
        self.optimizer = None if rate is None else torch.optim.AdamW(module.parameters(), lr=rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        # An engine that has no part in it keeps no gradient of it.
        assert self.optimizer is not None
        params = list(self.module.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params, retain_graph=True), strict=True):
            param.grad = grad if param.grad is None else param.grad + grad

    def step(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1


def network(name: str, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(list(STAGES).index(name))
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def engine(name: str, inputs: int, outputs: int, *, is_plain: bool) -> Any:
    module, rate = network(name, inputs, outputs), RATES.get(name)
    if is_plain:
        return Plain(module, rate)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": STAGES[name]},
    }
    optimizer = None if rate is None else torch.optim.AdamW(module.parameters(), lr=rate)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def draws(number: int, width: int, rank: int, world: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(number))[rank::world]


def gan(rank: int, world: int, *, is_plain: bool) -> tuple[list[Tensor], list[int]]:
    maker = engine("generator", 4, 6, is_plain=is_plain)
    judge = engine("critic_of_images", 6, 1, is_plain=is_plain)
    losses: list[Tensor] = []
    for number in range(4):
        real, fake = draws(number, 6, rank, world).sin(), maker(draws(50 + number, 4, rank, world))
        of_judge = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(fake.detach())).mean()
        judge.backward(of_judge)
        judge.step()
        of_maker = nn.functional.softplus(-judge(fake)).mean()
        maker.backward(of_maker)
        maker.step()
        losses += [of_judge.detach(), of_maker.detach()]
    return losses, [maker.global_steps, judge.global_steps]


def policy(rank: int, world: int, *, is_plain: bool) -> tuple[list[Tensor], list[int]]:
    actor, reference = (engine(name, 5, 7, is_plain=is_plain) for name in ("actor", "reference"))
    critic, reward = (engine(name, 5, 1, is_plain=is_plain) for name in ("critic", "reward"))
    reference.eval()
    reward.eval()
    losses: list[Tensor] = []
    for number in range(4):
        states = draws(90 + number, 5, rank, world)
        with torch.no_grad():
            wanted = reference(states).log_softmax(-1)
            score = reward(states)
        advantage = score - critic(states).detach()
        said = actor(states).log_softmax(-1)
        of_actor = (said - wanted).square().mean() - (advantage * said[:, :1]).mean()
        actor.backward(of_actor)
        actor.step()
        of_critic = nn.functional.mse_loss(critic(states), score)
        critic.backward(of_critic)
        critic.step()
        losses += [of_actor.detach(), of_critic.detach()]
    return losses, [actor.global_steps, critic.global_steps]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if not args.plain:
        deepspeed.init_distributed()
    rank, world = (0, 1) if args.plain else (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
    facts: dict[str, object] = {}
    for loop in (gan, policy):
        losses, updates = loop(rank, world, is_plain=args.plain)
        means = torch.stack(losses)
        if not args.plain:
            deepspeed.comm.all_reduce(means)
        facts[loop.__name__] = {"losses": (means / world).tolist(), "updates": updates}
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump(facts, file)


if __name__ == "__main__":
    main()
