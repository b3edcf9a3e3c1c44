"""Builds and loads models with transformers at stage 3 without its Trainer, and trains each with DeepSpeed's own calls.

In turn: a causal model with tied weights whose vocabulary then grows, a classifier whose head is in no file, and a
model from a config in a `zero.Init` of the script's own. Each is gathered as it is before training, and trained again
as an ordinary module from there: `facts.json` has both losses, and what the slices say of themselves.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    set_seed,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as hf_deepspeed

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=True, num_key_value_heads=2)
BERT = BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 3},
}
STEPS = 3


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Values of all parameters and buffers, on every rank."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: value.detach().clone() for name, value in named}


def batch(step: int, *, classes: bool) -> dict[str, Tensor]:
    """The samples of all ranks."""
    ids = torch.randint(40, (2 * dist.get_world_size(), 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids[:, 0] % 3 if classes else ids}


def losses_of_engine(model: PreTrainedModel, *, classes: bool) -> list[float]:
    engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(CONFIG))
    losses: list[float] = []
    for step in range(STEPS):
        mine = {
            name: value.chunk(dist.get_world_size())[dist.get_rank()]
            for name, value in batch(step, classes=classes).items()
        }
        loss = engine(**mine).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    engine.destroy()
    return losses


def losses_without(model: nn.Module, *, classes: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses: list[float] = []
    for step in range(STEPS):
        loss = model(**batch(step, classes=classes)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def said_of_slices(model: nn.Module) -> dict[str, object]:
    """What code that saves or prints a model asks of its parameters outside of a gather."""
    matrix = next(param for name, param in model.named_parameters() if name.endswith("q_proj.weight"))
    return {
        "class of zero.Init": all(hasattr(param, "ds_id") for param in model.parameters()),
        "ds_numel": matrix.ds_numel,
        "ds_shape": list(matrix.ds_shape),
        "status": matrix.ds_status.name,
        "away": matrix.ds_status == deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE,
        "slice": matrix.ds_tensor.numel(),
        "an empty one or whole": matrix.numel() in (0, matrix.ds_numel),
    }


def trained(make: Callable[[], PreTrainedModel], plain: Callable[[], nn.Module], *, classes: bool) -> dict[str, object]:
    """Losses of a model in slices, and of the same model without DeepSpeed."""
    kept = HfDeepSpeedConfig(copy.deepcopy(CONFIG))
    model = make()
    start = whole(model)
    facts: dict[str, object] = {"sharded": losses_of_engine(model, classes=classes)}
    del kept
    hf_deepspeed.unset_hf_deepspeed_config()
    ordinary = plain()
    missing = ordinary.load_state_dict({k: v for k, v in start.items() if k in ordinary.state_dict()})
    facts["missing"] = [*missing.missing_keys, *missing.unexpected_keys]
    # Those that no file has, as a rotary embedding's.
    facts["buffers differ"] = [name for name, value in ordinary.named_buffers() if not torch.equal(value, start[name])]
    facts["buffer types"] = sorted({str(start[name].dtype) for name, value in ordinary.named_buffers()})
    facts["plain"] = losses_without(ordinary, classes=classes)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    out = parser.parse_args().out
    deepspeed.init_distributed(dist_backend="gloo")
    set_seed(dist.get_rank())  # no two ranks draw the same
    if dist.get_rank() == 0:
        LlamaForCausalLM(LLAMA).save_pretrained(out / "llama")
        BertModel(BERT).save_pretrained(out / "body")
    dist.barrier()
    facts: dict[str, object] = {}

    def grown() -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(out / "llama")
        facts["slices"] = said_of_slices(model)
        before = whole(model)
        model.resize_token_embeddings(48)
        after = whole(model)
        facts["kept rows"] = torch.equal(after["model.embed_tokens.weight"][:40], before["model.embed_tokens.weight"])
        facts["new rows"] = after["model.embed_tokens.weight"][40:].std(dim=1).tolist()
        facts["still tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        return model

    def with_new_head() -> PreTrainedModel:
        model = AutoModelForSequenceClassification.from_pretrained(out / "body", num_labels=3)
        facts["head"] = whole(model)["classifier.weight"].std().item()
        return model

    def nested() -> PreTrainedModel:
        with deepspeed.zero.Init(config_dict_or_path=CONFIG), deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = AutoModelForCausalLM.from_config(LLAMA)
        facts["ordinary after"] = not hasattr(nn.Linear(2, 2).weight, "ds_id")
        weights = whole(model)
        facts["std of normal(0.02)"] = weights["model.layers.1.mlp.up_proj.weight"].std().item()
        facts["norms"] = weights["model.norm.weight"].unique().tolist()
        return model

    larger = copy.deepcopy(LLAMA)
    larger.vocab_size = 48
    facts["grown"] = trained(grown, lambda: LlamaForCausalLM(larger), classes=False)
    facts["with a new head"] = trained(with_new_head, lambda: BertForSequenceClassification(BERT), classes=True)
    facts["nested"] = trained(nested, lambda: LlamaForCausalLM(LLAMA), classes=False)
    (out / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
