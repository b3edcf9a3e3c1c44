"""What a forward computes: MACs are those of DeepSpeed 0.19.8, recorded there; flops are twice as many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dsrun
from dsrun.errors import InputError
from dsrun.runtime.deepspeed.estimates.flops import FlopsProfiler, get_model_profile, number_to_string, params_to_string

QUIET = {"print_profile": False, "as_string": False}


class Attention(nn.Module):
    """Four heads, two of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.k, self.v = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            part.view(samples, length, heads, 16).transpose(1, 2)
            for part, heads in ((self.q(x), 4), (self.k(x), 2), (self.v(x), 2))
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(samples, length, 64))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).view(-1, 128), labels.view(-1))

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self(input_ids, input_ids) + self(input_ids, input_ids)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def convolution() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(*layers)


IDS = {"input_ids": torch.zeros(2, 32, dtype=torch.long), "labels": torch.zeros(2, 32, dtype=torch.long)}


@pytest.mark.parametrize(
    ("make", "inputs", "macs", "params", "deepspeed_flops"),
    [
        (perceptron, {"input_shape": (4, 16)}, 3072, 808, 6272),
        (convolution, {"input_shape": (2, 3, 8, 8)}, 37888, 5370, 79872),
        (Language, {"kwargs": IDS}, 4718592, 66432, 9535488),
    ],
)
def test_macs_and_parameters_are_deepspeeds_and_flops_are_those_of_products_alone(
    make: Any, inputs: dict[str, Any], macs: int, params: int, deepspeed_flops: int
) -> None:
    assert get_model_profile(make(), **inputs, **QUIET) == (2 * macs, macs, params)
    # DeepSpeed's have those of activations, norms and sums too.
    assert 2 * macs < deepspeed_flops < 1.06 * 2 * macs


def test_a_tiny_llama_has_deepspeeds_macs() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    for kind in ("sdpa", "eager"):
        config._attn_implementation = kind
        model = transformers.LlamaForCausalLM(config)
        found = get_model_profile(model, kwargs=IDS, **QUIET)
        assert found == (11534336, 5767168, 90432), kind  # 0.19.8: 11550720 flops with sdpa, and 11567104


@pytest.mark.parametrize(
    ("make", "inputs", "macs"),
    [
        (lambda: nn.MultiheadAttention(16, 4, batch_first=True), 3, 11840),
        (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1, 22080),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), 1, 44160),
    ],
)
def test_torchs_own_attention_has_deepspeeds_macs(make: Any, inputs: int, macs: int) -> None:
    found = get_model_profile(make(), args=[torch.ones(2, 5, 16)] * inputs, **QUIET)
    assert found[1] == macs  # of 0.19.8, for evaluation as here


@pytest.mark.parametrize("enabled", [True, False])
def test_torchs_fast_path_is_as_it_was_after_a_profile(enabled: bool) -> None:
    class Failing(nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            raise RuntimeError("as told")

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        get_model_profile(nn.MultiheadAttention(16, 4), args=[torch.ones(5, 2, 16)] * 3, **QUIET)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
        with pytest.raises(RuntimeError, match="as told"):
            get_model_profile(Failing(16, 4), args=[torch.ones(5, 2, 16)] * 3, warm_up=0, **QUIET)
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_numbers_are_written_as_deepspeed_writes_them() -> None:
    assert get_model_profile(perceptron(), (4, 16), print_profile=False) == ("6.14 K", "3.07 KMACs", "808")
    assert [number_to_string(number) for number in (0, 1, 0.002, 3e-6, 1.25e13)] == [
        *("0 ", "1 ", "2 m", "3 u", "12.5 T"),
    ]
    assert number_to_string(12345, "K", 1) == "12.3 K"
    assert params_to_string(7e9) == "7 B"


def test_each_module_has_its_share_and_those_that_are_left_out_count_for_what_they_are_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = perceptron()
    get_model_profile(model, (4, 16), module_depth=0)
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith(("0 ", "1 ", "2 "))}
    assert "544 (67.33%)  2.05 KMACs (66.67%)" in rows["0"]
    assert "264 (32.67%)  1.02 KMACs (33.33%)" in rows["2"]
    assert "    MACs        - Sequential 3.07 KMACs\n" in shown
    assert "depth 1" not in shown
    path = tmp_path / "new" / "profile.txt"
    kept = get_model_profile(model, (4, 16), ignore_modules=[nn.Linear], output_file=str(path), as_string=False)
    assert kept[1] == 3072
    text = path.read_text()
    assert "ReLU" in text
    assert "Linear" not in text
    assert capsys.readouterr().out == ""


def test_a_list_of_modules_has_what_those_in_it_do(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Language(), kwargs=IDS, module_depth=1, top_modules=2, detailed=False)
    assert "    MACs        - ModuleList 4.19 MMACs, Linear 524.29 KMACs\n" in capsys.readouterr().out


def test_a_profile_is_of_a_run_for_evaluation_and_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    get_model_profile(model, args=[torch.ones(3, 4)], print_profile=False)
    assert model.training
    assert not model[0]._forward_hooks
    assert int(model[2].num_batches_tracked) == 0
    assert all(param.grad is None for param in model.parameters())


def test_all_forwards_of_a_generation_count() -> None:
    once = get_model_profile(Language(), kwargs=IDS, **QUIET)
    twice = get_model_profile(Language(), args=[IDS["input_ids"]], mode="generate", **QUIET)
    assert twice[0] == 2 * once[0]


def test_a_profiler_counts_forwards_and_no_backward_while_an_engine_trains(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine = dsrun.initialize(model=perceptron(), config=settings)[0]
    profiler = FlopsProfiler(engine.module, engine, recompute_fwd_factor=1.0)
    capsys.readouterr()
    profiler.print_model_profile()
    assert capsys.readouterr().out == ""  # nothing was counted
    profiler.start_profile()
    for _ in range(3):
        engine.backward(engine(torch.ones(4, 16)).sum())
        engine.step()
    profiler.stop_profile()
    engine(torch.ones(4, 16))
    assert (profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()) == (18432, 9216, 808)
    assert profiler.get_total_duration() > 0
    profiler.print_model_profile(profile_step=3)
    assert f"{'bwd flops per GPU, by the forward' + chr(39) + 's:':<40}55.3 K\n" in capsys.readouterr().out
    profiler.print_model_aggregated_profile(top_modules=1)
    assert "depth 1:\n    params      - Linear 808\n" in capsys.readouterr().out
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    profiler.end_profile()
    assert not profiler.started


def test_a_forward_that_fails_leaves_no_counter_behind() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("as told")

    model = nn.Sequential(nn.Linear(4, 4), Failing())
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as told"):
            model(torch.ones(1, 4))
    assert profiler.get_total_macs() == 32
    profiler.end_profile()


def test_recurrent_layers_are_said_not_to_count(caplog: pytest.LogCaptureFixture) -> None:
    get_model_profile(nn.LSTM(4, 4), (3, 2, 4), print_profile=False)
    assert "what recurrent layers do is not counted" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": len}, "model is a builtin_function_or_method"),
        ({}, "there is no input"),
        ({"input_shape": ()}, r"input_shape is \(\)"),
        ({"input_shape": (4, 16), "mode": "train"}, "mode is 'train'"),
    ],
)
def test_what_cannot_be_profiled_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        get_model_profile(**{"model": perceptron(), **arguments})
