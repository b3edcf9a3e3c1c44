"""Every transformers configuration that has a plan for tensor parallelism, tiny, cut over two ranks of threads."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.config.load import load
from dsrun.errors import DsrunError
from dsrun.runtime.layout.cuts import Cuts
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.parallel.tensor.comparison.first_forward import compare_in_first_forward
from dsrun.runtime.parallel.tensor.comparison.regions import kinds_of_regions
from dsrun.runtime.parallel.tensor.cut import cut_layers, of_first_rank
from dsrun.runtime.parallel.tensor.sources.choose import find_plan

from .decoder_families import NO_DECODER, VOCAB, configurations, loss_of, tiny

RANKS = 2
#: Largest difference of a loss or a gradient, by its norm. Models are in fp64, but norms and routers go to fp32 inside.
BOUND = 1e-4
#: Configurations without a language model that ids alone drive: they are parts of models that take images or sound.
NO_TEXT: dict[str, str] = {
    **dict.fromkeys(
        (
            "Ernie4_5_VLMoeVisionConfig",
            "Ernie4_5_VL_MoeVisionConfig",
            "Gemma4VisionConfig",
            "Llama4VisionConfig",
            "MuseGlimmerVisionConfig",
        ),
        "takes images",
    ),
    **dict.fromkeys(("Llama4Config", "MuseGlimmerConfig", "MuseSparkConfig"), "wraps a text and a vision model"),
    "MuseGlimmerAssistantConfig": "takes hidden states of another model",
}


def families() -> dict[str, Any]:
    """Returns the configurations by name."""
    found = configurations("base_model_tp_plan")
    return {name: config for name, config in found.items() if name not in NO_DECODER and name not in NO_TEXT}


def result_of(config: Any) -> str:
    """Returns `passes`, `refused: REASON`, or how the parts differ from the whole model."""
    torch.manual_seed(3)
    model: Any = tiny(config).train().double()
    model.set_experts_implementation("eager")  # grouped products know no fp64
    given = _inputs(model)
    loss = loss_of(model(**given))
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    try:
        found = LoopbackWorld(RANKS).run(lambda axis: _of_rank(models[axis.rank], axis, given, grads))
    except DsrunError as error:
        return f"refused: {str(error).splitlines()[0]}"
    for value, wrong in found:
        if abs(value - loss.item()) > BOUND * abs(loss.item()):
            return f"loss {loss.item()} and {value}"
        if wrong:
            return f"gradients of {', '.join(wrong[:4])}"
    return "passes"


def _inputs(model: nn.Module) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    names = inspect.signature(model.forward).parameters
    return {**given, "labels": ids} if "labels" in names else given


def _of_rank(
    model: nn.Module, axis: Collectives, given: dict[str, Any], grads: dict[str, Tensor | None]
) -> tuple[float, list[str]]:
    section = load({"train_batch_size": 1, "tensor_parallel": {"autotp_size": RANKS}}, world_size=RANKS)
    plan = find_plan(model, section.tensor_parallel, RANKS)
    kinds = kinds_of_regions(model, plan)
    cuts = cut_layers(model, plan, axis, of_first_rank(axis, torch.device("cpu")), device=torch.device("cpu"))
    compare_in_first_forward(model, kinds, cuts, axis, source=plan.source, say=lambda text: None)
    loss = loss_of(model(**given))
    loss.backward()
    return loss.item(), _wrong(model, cuts, axis, grads)


def _wrong(model: nn.Module, cuts: Cuts, axis: Collectives, grads: dict[str, Tensor | None]) -> list[str]:
    """Returns the parameters with gradients that are not those of the whole model."""
    largest = max(grad.norm().item() / max(grad.numel(), 1) ** 0.5 for grad in grads.values() if grad is not None)
    found: list[str] = []
    for name, param in model.named_parameters():
        want, mine, cut = grads[name], param.grad, cuts.get(id(param))
        if want is None:
            found += [name] if mine is not None else []
            continue
        mine = torch.zeros_like(param) if mine is None else mine
        if cut is not None and cut.whole is not None:
            want = torch.cat([want[box.slices].reshape(-1) for box in cut.whole.boxes]).view(mine.shape)
        else:  # an engine takes the mean of what is whole on all ranks, and the sum of what is in parts
            mine = mine.contiguous().clone()
            axis.all_reduce(mine.view(-1)).wait()
            mine = mine if cut is not None else mine / axis.size
        scale = max(want.norm().item(), 1e-3 * largest * want.numel() ** 0.5)
        if (mine - want).norm().item() > BOUND * scale:
            found.append(name)
    return found


if __name__ == "__main__":
    for one, family in families().items():
        try:
            print(f"{one:40} {result_of(family)}", flush=True)
        except Exception as problem:
            print(f"{one:40} {type(problem).__name__}: {str(problem)[:200]}", flush=True)
