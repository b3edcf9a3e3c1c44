"""Drives OpenRLHF's strategy class as its trainers do: a policy, a reference and an averaged copy of the policy.

Each way is a ZeRO stage, with `o` for Adam on the CPU, and trains the same tiny Llama in float32. Facts of each rank go
to `OUT/WAY/facts-RANK.json`. `plain` does the same in one process of torch alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_on_cpu
import stand_ins
import torch
import trl_tiny
from torch.utils.data import TensorDataset
from transformers.trainer import get_scheduler

MICRO, BATCH, UPDATES, BETA, CLIP = 2, 8, 4, 0.9, 1.0
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON = {"lr": 0.02, "momentum": 0.95}


def sequences() -> torch.Tensor:
    return torch.randint(3, 99, (BATCH * UPDATES, 10), generator=torch.Generator().manual_seed(5))


def loss_of(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return -log_probs.mean() + 0.1 * (log_probs - reference).square().mean()


def settings(optim: str = "adam") -> dict[str, Any]:
    return {
        "optim": optim,
        "adam": ADAM,
        "muon": MUON,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.3,
        "min_lr_ratio": 0.1,
        "max_norm": CLIP if optim == "adam" else 0.0,
        "scheduler_steps": UPDATES,
    }


# On OpenRLHF ----------------------------------------------------------------------------------------------------------


def strategy_at(stage: int, *, offload: bool) -> Any:
    from openrlhf.utils import get_strategy

    ds = SimpleNamespace(zero_stage=stage, adam_offload=offload, param_dtype="fp32", tensor_parallel_size=1)
    train = SimpleNamespace(seed=7, micro_batch_size=MICRO, batch_size=BATCH)
    strategy = get_strategy(SimpleNamespace(ds=ds, train=train, local_rank=-1, max_norm=CLIP))
    strategy.setup_distributed()
    return strategy


def actor(seed: int = 0) -> Any:
    from openrlhf.models import Actor

    made = Actor(trl_tiny.model(seed=seed))
    made.packing_samples = False
    return made


def log_probs_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, attention_mask=torch.ones_like(tokens), return_logprobs=True)


def train(way: str, out: Path) -> dict[str, Any]:
    """One way from the models to files: trains, puts states aside and takes them back, saves, loads and goes on."""
    from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states

    strategy = strategy_at(int(way[0]), offload=way.endswith("o"))
    policy = actor()
    policy.gradient_checkpointing_enable()
    (policy, optim, scheduler), reference, average = strategy.prepare((policy, settings()), actor(1), actor())
    average._offload = True
    reference.eval()
    facts: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "accumulation": strategy.accumulated_gradient}

    def update(loader: Any, model: Any) -> None:
        model.train()
        for (tokens,) in loader:
            with torch.no_grad():
                kept = log_probs_of(reference, tokens)
            loss = loss_of(log_probs_of(model, tokens), kept)
            strategy.backward(loss, model, optim)
            strategy.optimizer_step(optim, model, scheduler)
            strategy.moving_average(model, average, BETA)
            facts["losses"].append(strategy.all_reduce({"loss": loss.item()})["loss"])
            facts["norms"].append(strategy.get_grad_norm(model))
            facts["rates"].append(scheduler.get_last_lr()[0])

    half = BATCH * UPDATES // 2
    first, second = (TensorDataset(part) for part in sequences().split(half))
    update(strategy.setup_dataloader(first, MICRO, shuffle=False), policy)
    offload_deepspeed_states(policy.model)
    reload_deepspeed_states(policy.model)
    strategy.save_ckpt(policy.model, str(out / "ckpt"), tag="half", client_state={"consumed": half}, metric_value=0.5)
    update(strategy.setup_dataloader(second, MICRO, shuffle=False), policy)
    tokenizer = trl_tiny.tokenizer()
    strategy.save_model(policy, tokenizer, str(out / "policy"))
    strategy.save_model(average, tokenizer, str(out / "average"))

    # Another engine goes on from the checkpoint in the middle.
    (again, optim, scheduler) = strategy.prepare((actor(3), settings()))
    path, states = strategy.load_ckpt(again.model, str(out / "ckpt"))
    facts |= {"loaded": path is not None, "states": states, "steps": policy.model.global_steps}
    average = strategy.prepare(actor(2))
    straight = facts["losses"][len(facts["losses"]) // 2 :]
    update(strategy.setup_dataloader(second, MICRO, shuffle=False), again)
    facts["went on"] = facts["losses"][-len(straight) :] == straight
    facts["gathered"] = strategy.all_gather(torch.tensor([float(strategy.get_rank())])).tolist()
    facts["largest"] = strategy.all_reduce(float(strategy.get_rank()), "max")
    facts["nothing"] = list(strategy.load_ckpt(again.model, str(out / "none")))
    return facts


def muon(way: str) -> dict[str, Any]:
    strategy = strategy_at(int(way[0]), offload=False)
    policy, optim, scheduler = strategy.prepare((actor(), settings("muon")))
    losses: list[float] = []
    for (tokens,) in strategy.setup_dataloader(TensorDataset(sequences()), MICRO, shuffle=False):
        log_probs = log_probs_of(policy, tokens)
        loss = loss_of(log_probs, log_probs.detach())
        strategy.backward(loss, policy, optim)
        strategy.optimizer_step(optim, policy, scheduler)
        losses.append(strategy.all_reduce(loss.item()))
    return {"losses": losses, "rates": sorted({group["lr"] for group in optim.param_groups})}


# On torch alone -------------------------------------------------------------------------------------------------------


def _log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def plain(ranks: int, out: Path) -> dict[str, Any]:
    """What the ranks do together: a micro batch is theirs side by side, as the sampler deals them."""
    model, reference = trl_tiny.model(), trl_tiny.model(seed=1)
    average = copy.deepcopy(model)
    # The names that OpenRLHF keeps from decay.
    spared = [parameter for name, parameter in model.named_parameters() if "norm.weight" in name]
    spared_ids = {id(parameter) for parameter in spared}
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in spared_ids]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=math.ceil(UPDATES * 0.3),
        num_training_steps=UPDATES,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    facts: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    accumulation = BATCH // MICRO // ranks
    for number, tokens in enumerate(sequences().split(MICRO * ranks)):
        with torch.no_grad():
            kept = _log_probs(reference, tokens)
        loss = loss_of(_log_probs(model, tokens), kept)
        (loss / accumulation).backward()
        facts["losses"].append(loss.item())
        if (number + 1) % accumulation == 0:
            facts["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.data.mul_(BETA).add_(parameter.data, alpha=1 - BETA)
            facts["rates"].append(scheduler.get_last_lr()[0])
    model.save_pretrained(out / "policy")
    average.save_pretrained(out / "average")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", help="stages, with o for Adam on the CPU, with m for Muon; or plain")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda_on_cpu.install()
    stand_ins.install("flash_attn.bert_padding", "flash_attn.utils.distributed", "torchdata", "pylatexenc")
    for way in args.ways:
        out = args.out / way
        out.mkdir(parents=True, exist_ok=True)
        facts = plain(2, out) if way == "plain" else muon(way) if way.endswith("m") else train(way, out)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (out / f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
