"""Parameters of published models, counted from the keys of their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.errors import ModelError
from dsrun.estimate.model.architecture import assumptions, from_transformers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA, 6_738_415_616),
        (
            {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
            8_030_261_248,
        ),
        (
            {**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
            7_241_732_096,
        ),
        (
            {
                "model_type": "qwen2",
                "hidden_size": 3584,
                "num_hidden_layers": 28,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
                "tie_word_embeddings": False,
            },
            7_615_616_512,
        ),
        (
            {
                "model_type": "qwen3",
                "hidden_size": 4096,
                "num_hidden_layers": 36,
                "intermediate_size": 12288,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            8_190_735_360,
        ),
        ({"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
        (
            {
                "model_type": "gpt_neox",
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "intermediate_size": 16384,
                "num_attention_heads": 32,
                "vocab_size": 50432,
            },
            6_857_302_016,
        ),
    ],
    ids=["llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gpt2", "pythia-6.9b"],
)
def test_a_published_model_has_its_published_number_of_parameters(config: dict[str, Any], numel: int) -> None:
    assert from_transformers(config, source="config.json").numel == numel


def test_all_missing_and_malformed_sizes_are_told_at_once() -> None:
    with pytest.raises(ModelError) as error:
        from_transformers({"hidden_size": "wide", "vocab_size": 32000}, source="config.json")
    assert error.value.render() == (
        "error: config.json: `num_hidden_layers` is missing\n"
        "hint: expected a transformers config.json of a decoder-only model\n"
        "error: config.json: `hidden_size` is wide; expected a whole number above 0\n"
        "error: config.json: `num_attention_heads` is missing"
    )


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_a_mixture_of_experts_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ModelError, match=f"`{key}` is 8; mixtures of experts are not counted"):
        from_transformers({**LLAMA, key: 8}, source="config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1,000,000,000; no model has that many"),
        ({"hidden_size": 10**200}, "`hidden_size` is above 10^15; no model has that many"),
        ({"num_key_value_heads": "8"}, "`num_key_value_heads` is 8; expected a whole number above 0"),
        ({"intermediate_size": "abc"}, "`intermediate_size` is abc; expected a whole number above 0"),
        ({"num_attention_heads": 10**6}, "1,000,000 attention heads are more than the width of 4,096"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` is false; expected true or false"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder is not counted from a config.json"),
    ],
)
def test_a_size_that_cannot_be_is_told_and_not_replaced(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        from_transformers({**LLAMA, **change}, source="config.json")
    assert error.value.problems[0].message == f"config.json: {message}"


def test_sizes_in_a_text_config_are_named() -> None:
    with pytest.raises(ModelError, match="the sizes are in `text_config`"):
        from_transformers({"model_type": "gemma3", "text_config": LLAMA}, source="config.json")


def test_an_unknown_kind_of_model_is_counted_with_a_note() -> None:
    assert assumptions(LLAMA) == ()
    assert assumptions({**LLAMA, "model_type": "opt"}) == (
        "`model_type` is `opt`, whose layers are not known here: counted as Llama's",
    )


def test_latent_attention_is_refused_by_its_key() -> None:
    with pytest.raises(ModelError, match="`kv_lora_rank` is 512"):
        from_transformers({**LLAMA, "kv_lora_rank": 512}, source="config.json")


def test_tied_embeddings_count_once() -> None:
    tied = from_transformers({**LLAMA, "tie_word_embeddings": True}, source="config.json")
    assert tied.numel == 6_738_415_616 - 32000 * 4096
