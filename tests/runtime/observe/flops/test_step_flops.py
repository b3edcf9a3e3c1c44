"""FLOPs of steps: counted once a shape, looked up afterwards, estimated where nothing can be watched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.runtime.observe.flops.counter import FlopCounter
from dsrun.runtime.observe.flops.peaks import peak_flops, product_peak_flops
from dsrun.runtime.observe.flops.step_flops import MOST_SHAPES, StepFlops
from support.core_speed import core_seconds
from support.models import CONTEXT, VOCAB, TinyGPT, loss_of
from support.ran_flops import RanFlops
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine


def steps_of(model: nn.Module) -> tuple[StepFlops, list[str]]:
    said: list[str] = []
    return StepFlops(lambda _: [model], say=said.append), said


def run(flops: StepFlops, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[float, float]:
    with flops.counting(0, args, kwargs):
        model(*args, **kwargs)
    return flops.take_step()


def tokens(samples: int, length: int = CONTEXT) -> Tensor:
    return torch.zeros(samples, length, dtype=torch.int64)


class Decoder(nn.Module):
    """Attention and a product, for inputs of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1))


def test_a_shape_is_counted_once_and_looked_up_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyGPT()
    flops, said = steps_of(model)
    first = run(flops, model, tokens(2))
    assert first[1] > first[0] > 0
    monkeypatch.setattr("dsrun.runtime.observe.flops.step_flops.FlopCounter", None)
    assert run(flops, model, tokens(2)) == first
    assert flops.take_step() == (0, 0)
    for _ in range(4):
        with flops.counting(0, (tokens(2),), {}):
            model(tokens(2))
    assert flops.take_step() == (4 * first[0], 4 * first[1])
    assert said == []
    assert not flops.is_estimated


def test_a_later_forward_costs_less_than_20_microseconds() -> None:
    model = nn.Linear(4, 4)
    flops, _ = steps_of(model)
    batch: Mapping[str, Any] = {"input_ids": tokens(2), "attention_mask": tokens(2), "labels": tokens(2)}
    with flops.counting(0, (), batch):
        model(torch.ones(1, 4))

    def look_up() -> None:
        for _ in range(1000):
            with flops.counting(0, (), batch):
                pass

    assert core_seconds(look_up) < 1000 * 20e-6


def test_further_shapes_are_scaled_by_tokens_and_attention_by_length() -> None:
    model = Decoder()
    flops, said = steps_of(model)
    for samples in range(1, MOST_SHAPES + 1):
        run(flops, model, tokens(samples, 8))
    assert said == []
    found = run(flops, model, tokens(MOST_SHAPES, 24))
    assert flops.is_estimated
    counted, _ = steps_of(model)
    assert found == run(counted, model, tokens(MOST_SHAPES, 24))
    assert said == ["dsrun: FLOPs of further shapes of inputs are estimated from those of the first ones"]


def test_shapes_are_counted_again_where_another_plan_says_what_runs_again() -> None:
    model, plans = TinyGPT(), [object()]
    flops = StepFlops(lambda _: [model], say=print, plan_of=lambda: plans[-1])
    trained = run(flops, model, tokens(2))
    model.blocks.requires_grad_(False)
    assert run(flops, model, tokens(2)) == trained
    plans.append(object())
    assert run(flops, model, tokens(2))[0] < trained[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
def test_compiled_models_are_estimated_and_compile_as_often_as_without() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    plain = transformers.LlamaForCausalLM(config)
    counted, _ = steps_of(plain)
    expected = run(counted, plain, input_ids=tokens(2))
    compiles: list[None] = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(None)
        return graph.forward

    model = transformers.LlamaForCausalLM(config)
    for block in model.model.layers:
        block.compile(backend=backend)
    flops, said = steps_of(model)
    found = run(flops, model, input_ids=tokens(2))
    many = len(compiles)
    assert many in (1, 2)
    run(flops, model, input_ids=tokens(2))
    assert len(compiles) == many
    assert found[0] == pytest.approx(expected[0], rel=0.02)
    assert flops.is_estimated
    assert said == ["dsrun: FLOPs are estimated from the shapes of layers, for the model is compiled"]
    torch.compiler.reset()


def test_a_compiled_model_without_tokens_has_no_known_flops() -> None:
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    flops, said = steps_of(model)
    assert run(flops, model, torch.ones(2, 4)) == (-math.inf, -math.inf)
    assert said == ["dsrun: FLOPs are not known: the model is compiled, and is no language model of linear layers"]
    torch.compiler.reset()


def test_peaks_are_those_of_the_datasheet_and_never_a_guess() -> None:
    assert product_peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert product_peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert product_peak_flops("NVIDIA H200", torch.float64) is None
    assert product_peak_flops("NVIDIA GeForce GTX 1080", torch.float16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_products_in_fp32_by_tf32_have_no_known_peak() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert product_peak_flops("NVIDIA H200", torch.float32) is None
        assert product_peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


#: FLOPs of the scores that backwards of fused attention make again, in four blocks.
SCORES = 4 * 2 * 2 * (CONTEXT * (CONTEXT + 1) // 2) * 72

# In engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [
        {"policy": "none"},
        {"policy": "every_block"},
        {"policy": "interval", "interval": 2},
        {"policy": "sqrt"},
        {"policy": "hierarchical"},
        {"policy": "ratio", "ratio": 0.5},
        {"policy": "selective"},
    ],
    ids=lambda activation: activation["policy"],
)
def test_the_hardwares_flops_have_what_blocks_compute_again(activation: dict[str, Any]) -> None:
    settings = config(1, micro=2, activation_checkpointing=activation)
    model = TinyGPT(layers=4)
    engine = make_engine(settings, model=model)
    counter, ran = FlopCounter(), RanFlops()
    inputs, targets = batches(0, samples=2)
    with counter:
        loss = loss_of(engine(inputs), targets)
    count = counter.count().total
    with ran:
        engine.backward(loss)
    engine.step()
    engine.destroy()
    assert count.hardware - count.forward == ran.flops
    head = 2 * 2 * CONTEXT * model.head.weight.numel()
    blocks, last = count.forward - head, 2 * 2 * CONTEXT * model.blocks[0].down.weight.numel()  # type: ignore
    again = count.hardware - count.model - SCORES
    if activation["policy"] == "every_block":
        assert again == blocks - 4 * last  # the last product of a block is not made again
    if activation["policy"] in ("none", "selective"):
        assert again == 0


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_sample_has_the_same_flops_however_many_are_accumulated(accumulation: int) -> None:
    engine = make_engine(config(1, micro=2, accumulation=accumulation), model=TinyGPT())
    flops, _ = steps_of(engine.module)
    inputs, targets = batches(0, samples=2)
    taken: list[float] = []
    for _ in range(2):
        for _ in range(accumulation):
            with flops.counting(0, (inputs,), {}):
                output = engine(inputs)
            engine.backward(loss_of(output, targets))
            engine.step()
        taken.append(flops.take_step()[0] / accumulation / 2)
    engine.destroy()
    attention = 3 * 3 * 4 * (CONTEXT * (CONTEXT + 1) // 2) * 72
    linears = sum(part.weight.numel() for part in TinyGPT().modules() if isinstance(part, nn.Linear))
    assert taken == [6 * linears * CONTEXT + attention] * 2


def train_both(stage: int, more: dict[str, Any]) -> list[Any]:
    """Trains with each forward counted, and without."""
    return [train_counted(stage, more, counts) for counts in (True, False)]


def train_counted(stage: int, more: dict[str, Any], counts: bool) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Trains three steps, each forward under a counter or not; returns losses, weights and random numbers after."""
    torch.manual_seed(3)
    engine = make_engine(config(stage, micro=2, accumulation=2, **more), model=TinyGPT())
    flops = StepFlops(lambda _: [engine.module], say=print, plan_of=object)  # another plan for each forward
    losses: list[float] = []
    for step in range(3):
        inputs, targets = batches(step, samples=4 * engine.world_size)
        for micro in range(2):
            first = 2 * (micro * engine.world_size + engine.global_rank)
            x = inputs[first : first + 2]
            if counts:
                with flops.counting(0, (x,), {}):
                    output = engine(x)
            else:
                output = engine(x)
            loss = loss_of(output, targets[first : first + 2])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert not counts or flops.take_step()[0] > 0
    result = losses, full_parameters(engine), torch.rand(2)
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (1, {"activation_checkpointing": {"policy": "selective"}}),
        (3, {"activation_checkpointing": {"policy": "every_block"}, "bf16": True}),
    ],
)
def test_losses_weights_and_random_numbers_have_the_same_bits(stage: int, more: dict[str, Any]) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    more = {**more, "zero_optimization": zero}
    for (losses, weights, numbers), (their_losses, their_weights, their_numbers) in run_ranks(
        2, train_both, stage, more
    ):
        assert losses == their_losses
        assert all(torch.equal(weights[name], their_weights[name]) for name in their_weights)
        assert torch.equal(numbers, their_numbers)
