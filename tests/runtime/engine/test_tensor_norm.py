"""The global gradient norm where layers are cut over ranks: the norm of the whole gradients, each element once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.utils import safe_get_full_grad, safe_set_full_grad
from support.covering import covering
from support.inside_engine import units_of
from support.llama import llama, on_threads, tokens

#: One head of keys for all ranks, beside a vocabulary that is tied; and five heads of each kind for two or four ranks.
MODELS: dict[str, dict[str, Any]] = {
    "tied, repeated heads": {"tied": True, "key_heads": 1},
    "uneven heads": {"width": 40, "heads": 5, "key_heads": 5},
}
#: Number of ranks, and how many of them share a layer.
RANKS = {f"{ranks} by {tensor}": (ranks, tensor) for ranks, tensor in ((2, 2), (4, 4), (4, 2))}
SLICES = {f"slices={slices}": slices for slices in (False, True)}
STAGES = {f"stage={stage}": stage for stage in range(4)}
#: What both tests go through.
AXES = (RANKS, {model: model for model in MODELS}, SLICES, STAGES)
#: The largest relative error of one rounding in fp32.
ROUNDING = 2.0**-24
#: How far the norm may lie from that of the very gradients, relative to it; see runtime/optim/norm.py.
#:
#: In a block of 256 elements each square is rounded in fp32, and passes 255 additions at the most, in whichever order.
#: None is negative, so their sum has a relative error of 256 roundings at the most. The root halves that, and is
#: rounded itself: 129. The rest is done in fp64, and costs less than one more: a norm of fp32 has an exact square. The
#: n blocks are each rounded by half a unit at the most, which is 2^(b - 52) of the largest, where n < 2^b; together
#: that is 2^(2 b - 52) of the sum, here 2^-34, and half of it of the norm.
#: An error that no block exceeds the norm does not exceed. 2^-45 is less than a single rounding.
REAL = 130 * ROUNDING
#: Where all elements are 1, sums in fp32 are exact, and a block's root alone is rounded.
ONES = 2 * ROUNDING

Grads = dict[str, tuple[TensorBoxes, Tensor]]


def accumulate(engine: Any, data_rank: int) -> None:
    """Runs the micro batches of an update, up to the last one's `step`."""
    count = engine.gradient_accumulation_steps()
    for micro in range(count):
        batch = tokens(0, micro, data_rank)
        logits = engine(batch[:, :-1])
        engine.backward(F.cross_entropy(logits.double().flatten(0, 1), batch[:, 1:].flatten()))
        if micro < count - 1:
            engine.step()


def norms_of(engine: Any, data_rank: int) -> tuple[float, Grads]:
    """Returns the norm of an update, and the gradients that it is of, by name, with their places in whole ones."""
    accumulate(engine, data_rank)
    grads: Grads = {}
    for unit in units_of(engine):
        for extent, param in zip(unit.layout.extents, unit.params, strict=True):
            grad = safe_get_full_grad(param)
            assert grad is not None
            grads[extent.name] = extent.whole, grad
    engine.step()
    return engine.get_global_grad_norm(), grads


def whole_grads(found: Sequence[Grads]) -> dict[str, Tensor]:
    """Returns the whole gradients of ranks that share layers: parts by their boxes, and what all have once."""
    whole: dict[str, Tensor] = {}
    for name in found[0]:
        boxes = [one[name][0] for one in found]
        if not any(box.is_cut for box in boxes):
            whole[name] = found[0][name][1]
            assert all(torch.equal(one[name][1], whole[name]) for one in found), f"{name} is the same on all ranks"
            continue
        total, times = torch.zeros(boxes[0].shape), torch.zeros(boxes[0].shape)
        for one in found:
            part, grad = one[name]
            position = 0
            for box in part.boxes:
                total[box.slices] = grad.reshape(-1)[position : position + box.numel].view(box.shape)
                times[box.slices] += 1
                position += box.numel
        assert torch.equal(times, torch.ones_like(times)), f"each element of {name} is on one rank"
        whole[name] = total
    return whole


def on_ranks(
    body: Callable[[Any, int], Any], ranks: int, tensor: int, model: str, *, slices: bool, stage: int, **more: Any
) -> list[Any]:
    section = {"sequence_parallel": slices}
    return on_threads(
        ranks, tensor, body, make=lambda: llama(**MODELS[model]), stage=stage, tensor_parallel=section, **more
    )


@pytest.mark.parametrize(("sizes", "model", "slices", "stage", "bf16"), covering(*AXES, {"fp32": False, "bf16": True}))
def test_the_norm_is_that_of_the_whole_gradients_on_every_rank(
    sizes: tuple[int, int], model: str, slices: bool, stage: int, bf16: bool
) -> None:
    ranks, tensor = sizes
    found = on_ranks(norms_of, ranks, tensor, model, slices=slices, stage=stage, bf16={"enabled": bf16})
    assert len({norm for norm, _ in found}) == 1, "clipping by other factors would part the ranks"
    parts = [whole_grads([grads for _, grads in found[start : start + tensor]]) for start in range(0, ranks, tensor)]
    for name, grad in parts[0].items():
        assert all(torch.equal(one[name], grad) for one in parts), f"{name} is the mean over samples"
    assert {name: grad.shape for name, grad in parts[0].items()} == {
        name: param.shape for name, param in llama(**MODELS[model]).named_parameters()
    }
    # Squares of fp32 numbers are exact in fp64, and `fsum` rounds once.
    right = math.sqrt(math.fsum(x * x for grad in parts[0].values() for x in grad.flatten().tolist()))
    assert found[0][0] == pytest.approx(right, rel=REAL)


@pytest.mark.parametrize(("sizes", "model", "slices", "stage"), covering(*AXES))
def test_the_norm_counts_each_element_of_the_whole_model_once(
    sizes: tuple[int, int], model: str, slices: bool, stage: int
) -> None:
    """Among real gradients, one that is counted twice may be too small to be seen in the norm."""
    ranks, tensor = sizes

    def body(engine: Any, data_rank: int) -> float:
        accumulate(engine, data_rank)
        for param in engine.module.parameters():
            safe_set_full_grad(param, torch.ones_like(param))
        engine.step()
        return engine.get_global_grad_norm()

    found = on_ranks(body, ranks, tensor, model, slices=slices, stage=stage)
    assert len(set(found)) == 1
    numel = sum(param.numel() for param in llama(**MODELS[model]).parameters())
    assert found[0] == pytest.approx(math.sqrt(numel), rel=ONES)
