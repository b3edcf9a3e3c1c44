"""An input of another dtype than the model takes is named, with what this config has against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import ModelError
from support.training import config, make_engine

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 8}}
AUTOCAST = {"torch_autocast": {"enabled": True}}


class OwnError(RuntimeError):
    """Of a script, which it waits for."""


@dataclass
class Batch:
    """What a loader may give."""

    pixels: Tensor


class Model(nn.Module):
    """Tokens and values in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4, bias=False)
        self.gru = nn.GRU(4, 4)

    def forward(
        self,
        x_ND: Tensor,
        batch: dict[str, Any] | Batch | None = None,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        how: str = "linear",
    ) -> Tensor:
        """As `how` says."""
        match how:
            case "linear":
                out = self.layer(x_ND)
            case "embed":
                out = self.embed(x_ND)
            case "gru":
                out = self.gru(x_ND)[0]
            case "attention":
                q = self.layer(x_ND)[None]
                out = F.scaled_dot_product_attention(q, q, q, attn_mask=attention_mask)
            case "own":
                out = self.layer(torch.zeros(len(x_ND), 4))
            case "zeta":
                y_ND = self.layer(x_ND)
                out = torch.special.zeta(y_ND, y_ND)
            case "whole":
                out = self.layer(x_ND) & 1
            case "own error":
                raise OwnError("the same device was asked twice")
            case "nested":
                assert batch is not None
                out = self.layer(batch.pixels if isinstance(batch, Batch) else batch["pixels"][0])
            case _:
                raise RuntimeError("something else")
        return out.mean() if labels is None else F.cross_entropy(out, labels)


def met(more: dict[str, Any], *args: Any, **kwargs: Any) -> ModelError:
    engine = make_engine(config(0, micro=1) | more, model=Model())
    with pytest.raises(ModelError) as caught:
        engine(*args, **kwargs)
    engine.destroy()
    assert isinstance(caught.value.__cause__, (RuntimeError, ValueError))
    assert str(caught.value.__cause__) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("more", "given", "said", "hint"),
    [
        (
            BF16,
            torch.float32,
            "`x_ND` is float32, and the model's parameters are bfloat16, for `bf16` is enabled",
            'cast with .to(torch.bfloat16), or let the config do it: "torch_autocast": {"enabled": true}',
        ),
        (
            BF16,
            torch.float64,
            "`x_ND` is float64, and the model's parameters are bfloat16, for `bf16` is enabled",
            "cast with .to(torch.bfloat16)",
        ),
        (
            FP16,
            torch.float32,
            "`x_ND` is float32, and the model's parameters are float16, for `fp16` is enabled",
            "cast with .to(torch.float16), or let the config do it: `fp16.auto_cast` true",
        ),
        (
            {},
            torch.bfloat16,
            "`x_ND` is bfloat16, and the model's parameters are float32, for neither `bf16` nor `fp16` is enabled",
            'cast with .to(torch.float32), or train in it: "bf16": {"enabled": true}',
        ),
        (
            {},
            torch.float64,
            "`x_ND` is float64, and the model's parameters are float32, for neither `bf16` nor `fp16` is enabled",
            "cast with .to(torch.float32)",
        ),
        (
            AUTOCAST,
            torch.float64,
            "`x_ND` is float64, and the model's parameters are float32, for neither `bf16` nor `fp16` is enabled",
            "cast with .to(torch.float32)",
        ),
        (
            BF16,
            torch.int64,
            "`x_ND` is int64, and the model's parameters are bfloat16, for `bf16` is enabled",
            "what the model multiplies wants floating-point numbers: .to(torch.bfloat16)",
        ),
    ],
)
def test_an_input_is_named_with_its_dtype_and_the_way_out(
    more: dict[str, Any], given: torch.dtype, said: str, hint: str
) -> None:
    error = met(more, torch.ones(2, 4, dtype=given))
    assert str(error).startswith(f"engine(...): {said}: ")
    assert error.hint == hint


@pytest.mark.parametrize("more", [BF16 | AUTOCAST, AUTOCAST, FP16 | {"fp16": {"enabled": True, "auto_cast": True}}])
def test_what_a_hint_says_works(more: dict[str, Any]) -> None:
    engine = make_engine(config(0, micro=1) | more, model=Model())
    assert torch.isfinite(engine(torch.ones(2, 4)))
    engine.destroy()


def test_an_integer_mask_is_named_and_not_the_tokens() -> None:
    x, mask = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.int64)
    error = met(BF16, x, attention_mask=mask, how="attention")
    assert str(error).startswith("engine(...): `attention_mask` is int64: ")
    assert error.hint == "give the attention a mask of bool, true where it looks: mask.bool()"


@pytest.mark.parametrize(
    ("x", "how", "labels", "named"),
    [
        (torch.ones(2), "embed", None, "`x_ND` is float32"),
        (torch.ones(2, dtype=torch.int64), "embed", torch.ones(2), "`labels` is float32"),
        (torch.ones(2, 4), "linear", torch.ones(2), "`labels` is float32"),
        (torch.ones(2, 4), "linear", torch.ones(2, dtype=torch.int32), "`labels` is int32"),
    ],
)
def test_indices_and_classes_are_to_be_whole_numbers(x: Tensor, how: str, labels: Tensor | None, named: str) -> None:
    error = met({}, x, how=how, labels=labels)
    assert str(error).startswith(f"engine(...): {named}: ")
    assert error.hint is not None
    assert "give them as int64" in error.hint


def test_a_tensor_inside_of_a_batch_is_named_by_its_place() -> None:
    tokens = torch.ones(2, dtype=torch.int64)
    error = met(BF16, tokens, {"ids": tokens, "pixels": [torch.ones(2, 4)]}, how="nested")
    assert "`batch['pixels'][0]` is float32, and the model's parameters" in str(error)


def test_a_tensor_in_a_dataclass_is_named_by_its_place() -> None:
    error = met(BF16, torch.ones(2, dtype=torch.int64), Batch(torch.ones(2, 4)), how="nested")
    assert "`batch.pixels` is float32, and the model's parameters" in str(error)


@pytest.mark.parametrize(
    ("more", "given", "reason"),
    [(BF16, torch.bfloat16, "`bf16`"), (FP16, torch.float16, "`fp16`"), (AUTOCAST, torch.float32, "`torch_autocast`")],
)
def test_an_operation_that_does_not_know_the_models_dtype_is_said_to_be_one(
    more: dict[str, Any], given: torch.dtype, reason: str
) -> None:
    error = met(more, torch.ones(2, 4, dtype=given), how="zeta")
    dtype = "float16" if given == torch.float16 else "bfloat16"
    assert str(error).startswith(
        f"engine(...): the model computes in {dtype}, for {reason} is enabled, and an operation"
    )
    assert error.hint is not None
    assert "with .float()" in error.hint
    assert "torch.zeros" not in error.hint


def test_what_a_script_catches_it_catches_still() -> None:
    engine = make_engine(config(0, micro=1) | BF16, model=Model())
    with pytest.raises(RuntimeError, match="`x_ND` is float32"):
        engine(torch.ones(2, 4))
    with pytest.raises(ValueError, match="`x_ND` is float32"):
        engine(torch.ones(2, 4), how="gru")
    with pytest.raises(OwnError):
        engine(torch.ones(2, 4), how="own error")
    engine.destroy()


def test_what_torch_says_as_a_value_error_is_explained_too() -> None:
    assert "`x_ND` is float32" in str(met(BF16, torch.ones(2, 4), how="gru"))


def test_a_tensor_of_the_models_own_making_is_said_to_be_one() -> None:
    error = met(BF16, torch.ones(2, 4, dtype=torch.bfloat16), how="own")
    assert "a tensor that the forward makes has another dtype, and the model's parameters are bfloat16" in str(error)
    assert error.hint is not None
    assert "dtype=x.dtype" in error.hint


def test_an_input_on_another_device_is_named() -> None:
    engine = make_engine(config(0, micro=1), model=nn.Linear(4, 4))
    with pytest.raises(ModelError) as caught:
        engine(torch.ones(2, 4, device="meta"))
    assert str(caught.value).startswith("engine(...): `input` is on meta, and the model is on cpu: ")
    assert caught.value.hint is not None
    assert ".to(engine.device)" in caught.value.hint
    engine.destroy()


def test_other_errors_stay_as_they_are() -> None:
    engine = make_engine(config(0, micro=1, bf16=True), model=Model())
    with pytest.raises(RuntimeError, match=r"^something else$"):
        engine(torch.ones(2, 4), how="raise")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine(torch.ones(2, 3, dtype=torch.bfloat16))
    engine.destroy()
    engine = make_engine(config(0, micro=1), model=Model())
    with pytest.raises(RuntimeError, match=r"^\"bitwise_and_cpu\" not implemented for 'Float'$"):
        engine(torch.ones(2, 4), how="whole")
    engine.destroy()
