"""Families of models train as in plain torch at every stage, in fp32 and bf16, on two ranks: the same bits.

The other side adds up the gradients of both ranks itself, in the order of ranks and in the dtype in which they travel,
and steps torch's optimizer on whole fp32 tensors. Ranks are threads of this process, so transformers is imported once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.zero.units.find import find_units
from support.inside_engine import units_of
from support.model_families import FAMILIES, Family, Inputs
from support.threaded_ranks import ranks_of_threads
from support.training import config

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")

STAGES = (0, 1, 2, 3)
#: Families of different kinds, one of each, which train in fp32 too by default.
KINDS = ("Llama", "Mixtral", "Mamba", "Jamba", "T5", "BERT", "ConvNeXt", "CLIP", "LLaVA")
STEPS = 2  # the second one has moments of the first
SIZE = 2
RATE = 1e-2


@dataclass(frozen=True)
class Trained:
    """Losses of rank and step, and fp32 values of all parameters at the end."""

    losses: list[list[float]]
    weights: dict[str, Tensor]


def batch(family: Family, step: int, rank: int, dtype: torch.dtype) -> Inputs:
    given = family.inputs(torch.Generator().manual_seed(100 * step + rank))
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def built(family: Family) -> nn.Module:
    torch.manual_seed(7)
    return family.make().train()


def plainly(model: nn.Module, family: Family, dtype: torch.dtype) -> Trained:
    """What torch does with the batches of both ranks."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: param.detach().clone().requires_grad_() for name, param in trained.items()}
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE, weight_decay=0.1, fused=True)
    losses: list[list[float]] = [[] for _ in range(SIZE)]
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(SIZE):
            loss = model(**batch(family, step, rank, dtype)).loss
            loss.backward()
            losses[rank].append(loss.item())
            for name, param in trained.items():
                if param.grad is not None:
                    sums[name] = sums[name] + param.grad if name in sums else param.grad
                    param.grad = None
        for name, total in sums.items():
            masters[name].grad = (total / SIZE).float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(masters[name])
    return Trained(losses, {name: master.detach() for name, master in masters.items()})


def with_engines(model: nn.Module, family: Family, settings: dict[str, Any], dtype: torch.dtype) -> Trained:
    """What two engines do, each with its batches."""
    models = [model, copy.deepcopy(model)]

    def body(collectives: LoopbackCollectives) -> tuple[list[float], list[tuple[Any, Tensor]]]:
        rank = collectives.rank
        engine: Any = dsrun.initialize(model=models[rank], config=settings)[0]
        losses: list[float] = []
        for step in range(STEPS):
            loss = engine(**batch(family, step, rank, dtype)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        pieces = [(unit, unit.whole_master().detach().clone()) for unit in units_of(engine)]
        engine.destroy()
        return losses, pieces

    with ranks_of_threads(torch.device("cpu")) as here:
        ranks = LoopbackWorld(SIZE).run(lambda collectives: here(collectives, body))
    weights: dict[str, Tensor] = {}
    for pieces in zip(*(pieces for _, pieces in ranks), strict=True):
        flat = torch.zeros(pieces[0][0].layout.padded_numel)
        for unit, values in pieces:
            flat[slice(*unit.owned)] = values
        for extent in pieces[0][0].layout.extents:
            weights[extent.name] = flat[extent.offset : extent.offset + extent.numel].view(extent.shape).clone()
    return Trained([losses for losses, _ in ranks], weights)


def assert_same(found: Trained, expected: Trained, where: str) -> None:
    assert found.losses == expected.losses, where
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), f"{where}: {name}"


def cases() -> list[Any]:
    """Families with dtypes and stages: by default stages 2 and 3 in bf16, and of each kind 0 and 1 in fp32."""
    found: list[Any] = []
    for bf16, dtype in ((False, "fp32"), (True, "bf16")):
        for name in FAMILIES:
            if bf16 or name in KINDS:
                found.append(pytest.param(name, bf16, (2, 3) if bf16 else (0, 1), id=f"{name}-{dtype}"))
            soak = pytest.mark.soak("each family in bf16 at stages 2 and 3, one of each kind in fp32 at 0 and 1")
            found.append(pytest.param(name, bf16, STAGES, id=f"{name}-{dtype}-all", marks=soak))
    return found


@pytest.mark.parametrize(("name", "bf16", "stages"), cases())
def test_a_family_trains_as_in_plain_torch_at_every_stage(name: str, bf16: bool, stages: tuple[int, ...]) -> None:
    family, dtype = FAMILIES[name], torch.bfloat16 if bf16 else torch.float32
    model = built(family)
    expected = plainly(copy.deepcopy(model), family, dtype)
    for stage in stages:
        settings = config(stage, micro=2, bf16=bf16, gradient_clipping=0)
        found = with_engines(copy.deepcopy(model), family, settings, dtype)
        assert_same(found, expected, f"stage {stage}")


_RECOMPUTED = [
    *((name, "the config's") for name in ("Llama", "Mixtral", "Jamba", "T5", "ViT")),
    *((name, "the model's own") for name in ("Llama", "ViT")),
    *((name, "reentrant") for name in ("T5", "Jamba")),
]
_SOAK = pytest.mark.soak("the other families with the same way of recomputation")
_ALIKE = [
    *(pytest.param(name, "the model's own", marks=_SOAK) for name in ("Mixtral", "Jamba", "T5")),
    *(pytest.param(name, "reentrant", marks=_SOAK) for name in ("Llama", "Mixtral", "ViT")),
]


@pytest.mark.parametrize(("name", "how"), [*_RECOMPUTED, *_ALIKE])
def test_recomputation_changes_no_bit(name: str, how: str) -> None:
    family = FAMILIES[name]
    model: Any = built(family)
    settings = config(3, micro=2, gradient_clipping=0)
    if how == "the config's":
        for part in (model, *model.children()):  # a cache that blocks add to is not the same in the second run
            if hasattr(part, "config"):
                part.config.use_cache = False
        settings["activation_checkpointing"] = {"policy": "every_block"}
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    expected = plainly(copy.deepcopy(model), family, torch.float32)
    assert_same(with_engines(model, family, settings, torch.float32), expected, how)


def bloom() -> nn.Module:
    import transformers

    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("make", [bloom, FAMILIES["Falcon"].make, FAMILIES["T5"].make], ids=["Bloom", "Falcon", "T5"])
def test_a_cache_is_what_recomputation_has_against_a_family(make: Callable[[], nn.Module]) -> None:
    settings = config(0, micro=2, gradient_clipping=0, activation_checkpointing={"policy": "every_block"})
    engine: Any = dsrun.initialize(model=make().train(), config=settings)[0]
    ids = torch.arange(3, 11).repeat(2, 1)
    with pytest.raises(ModelError, match="it went another way") as caught:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
    assert caught.value.hint is not None
    assert "Cache)" in caught.value.hint
    assert "use_cache=False" in caught.value.hint
    engine.zero_grad()
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
    engine.destroy()


#: Models of real sizes, of which the configs' defaults are: what stays gathered of them.
REAL = ["Jamba", "Zamba2", "Bamba", "FalconH1", "Llama", "Mixtral", "Gemma2", "DeepseekV3"]


@pytest.mark.parametrize("name", REAL)
def test_little_of_a_real_model_stays_gathered(name: str) -> None:
    """Embeddings that are tied to a head are needed from the first moment to the last."""
    import transformers
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")())
    model.tie_weights()
    units = find_units(model)
    tied = model.get_input_embeddings().weight if model.config.tie_word_embeddings else None
    rest = sum(p.numel() for unit in units if unit.module is None for _, p in unit.params if p is not tied)
    whole = sum(param.numel() for param in model.parameters())
    assert rest < whole / 100
    assert max(sum(p.numel() for _, p in unit.params) for unit in units if unit.module is not None) < whole / 5
