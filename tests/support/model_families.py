"""One tiny model of each family that people train with transformers, and what a step of it is given.

Sizes are such that a layer has a few thousand parameters, and that most of them have no vector tails (see
engine/test_exactness.py). Nothing is random in forward: dropout is off everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
LENGTH = 8
IMAGE = 16
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model and its inputs.

    Attributes:
        make: builds the model, with random values.
        inputs: function that makes the inputs of one micro batch, with labels, so that the model gives a loss.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]


def tokens(generator: torch.Generator) -> Inputs:
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def pairs(generator: torch.Generator) -> Inputs:
    return {"input_ids": tokens(generator)["input_ids"], "labels": tokens(generator)["labels"]}


def image(generator: torch.Generator, *, size: int = IMAGE) -> Tensor:
    return torch.randn(2, 3, size, size, generator=generator)


def classified(generator: torch.Generator) -> Inputs:
    return {"pixel_values": image(generator), "labels": torch.randint(0, 16, (2,), generator=generator)}


def sound(generator: torch.Generator) -> Inputs:
    return {"input_features": torch.randn(2, 16, 32, generator=generator), "labels": tokens(generator)["labels"]}


def waves(generator: torch.Generator) -> Inputs:
    return {
        "input_values": torch.randn(2, 128, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def captioned(generator: torch.Generator) -> Inputs:
    return {**tokens(generator), "pixel_values": image(generator)}


def matched(generator: torch.Generator) -> Inputs:
    return {
        "input_ids": tokens(generator)["input_ids"],
        "pixel_values": image(generator),
        "return_loss": torch.tensor(True),
    }


def about_an_image(generator: torch.Generator) -> Inputs:
    given = captioned(generator)
    given["input_ids"] = torch.cat([torch.full((2, 4), 2), given["input_ids"]], 1)  # 2 stands for a part of the image
    return {**given, "labels": given["input_ids"]}


_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = {**_WIDE, **_SPECIAL, "num_hidden_layers": 2, "intermediate_size": 48, "num_key_value_heads": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": IMAGE,
    "patch_size": 8,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _of(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**values))

    return make


def _causal(name: str, **values: Any) -> Family:
    return Family(_of(f"{name}ForCausalLM", f"{name}Config", **{**_TEXT, **values}), tokens)


def _gpt2() -> Family:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        **_SPECIAL,
    }
    return Family(
        _of("GPT2LMHeadModel", "GPT2Config", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes), tokens
    )


def _t5() -> Family:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = {**sizes, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return Family(_of("T5ForConditionalGeneration", "T5Config", **config), pairs)


def _bart() -> Family:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        **_SPECIAL,
    }
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 48, f"{side}_attention_heads": 4}
    return Family(_of("BartForConditionalGeneration", "BartConfig", decoder_start_token_id=2, **sizes), pairs)


def _whisper() -> Family:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "num_mel_bins": 16, "dropout": 0.0, **_SPECIAL}
    sizes |= {"max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 48, f"{side}_attention_heads": 4}
    return Family(_of("WhisperForConditionalGeneration", "WhisperConfig", **sizes), sound)


def _wav2vec2() -> Family:
    sizes: dict[str, Any] = {
        **_WIDE,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_labels": 2,
        "layerdrop": 0.0,
    }
    sizes |= {"conv_dim": (16, 16), "conv_kernel": (4, 2), "conv_stride": (4, 2), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
    sizes |= {"mask_time_prob": 0.0, "apply_spec_augment": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    sizes |= {"activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
    return Family(_of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **sizes), waves)


def _clip() -> Family:
    text = {**_WIDE, **_SPECIAL, "num_hidden_layers": 2, "intermediate_size": 48, "projection_dim": 16}
    config = {"text_config": text, "vision_config": {**_VISION, "projection_dim": 16}, "projection_dim": 16}
    return Family(_of("CLIPModel", "CLIPConfig", **config), matched)


def _llava() -> Family:
    def make() -> nn.Module:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**_VISION), text_config=LlamaConfig(**_TEXT), image_token_index=2
        )
        return LlavaForConditionalGeneration(config)

    return Family(make, about_an_image)


def _zamba2() -> Family:
    kinds = ["mamba", "hybrid"] * 2
    sizes = {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "adapter_rank": 4,
        "chunk_size": 8,
    }
    more = {"num_hidden_layers": 4, "layers_block_type": kinds, "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]}
    return _causal("Zamba2", **sizes, **more)


def _modern_bert() -> Family:
    special = {**_SPECIAL, "cls_token_id": 1, "sep_token_id": 2}
    sizes = {"num_hidden_layers": 2, "intermediate_size": 48}
    return Family(_of("ModernBertForMaskedLM", "ModernBertConfig", **_WIDE, **special, **sizes), tokens)


def _pyramid(name: str, **values: Any) -> Family:
    """A network for images whose stages have blocks of other widths."""
    sizes = {"image_size": IMAGE, "patch_size": 2, "depths": [2, 2], **_LABELS, **values}
    return Family(_of(f"{name}ForImageClassification", f"{name}Config", **sizes), classified)


def _siglip() -> Family:
    text = {**_WIDE, **_SPECIAL, "num_hidden_layers": 2, "intermediate_size": 48, "projection_size": 32}
    return Family(_of("SiglipModel", "SiglipConfig", text_config=text, vision_config=_VISION), matched)


def _mamba2() -> Family:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "n_groups": 1}
    heads = {"num_heads": 16, "head_dim": 4, "chunk_size": 8}
    return Family(_of("Mamba2ForCausalLM", "Mamba2Config", **sizes, **heads), tokens)


def _linear_attention() -> Family:
    heads = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    return _causal("Qwen3Next", head_dim=8, num_experts=4, **heads, **kinds, **_EXPERTS)


_LABELS = {"num_labels": 16}
_SCAN: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_JAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4, "num_hidden_layers": 4}
_LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_DEEPSEEK: dict[str, Any] = {**_EXPERTS, **_LATENT, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1}
_LLAMA_4: dict[str, Any] = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4}

FAMILIES: dict[str, Family] = {
    "GPT-2": _gpt2(),
    "Llama": _causal("Llama"),
    "Mistral": _causal("Mistral"),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3", head_dim=8),
    "Phi-3": _causal("Phi3"),
    "GPT-NeoX": _causal("GPTNeoX"),
    "OLMo-2": _causal("Olmo2"),
    "Gemma 2": _causal("Gemma2", head_dim=8),
    "Gemma 3": Family(_of("Gemma3ForCausalLM", "Gemma3TextConfig", **_TEXT, head_dim=8), tokens),
    "OPT": _causal("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "Falcon": _causal("Falcon", num_kv_heads=2, ffn_hidden_size=48),
    "Llama 4": Family(_of("Llama4ForCausalLM", "Llama4TextConfig", **_TEXT, **_LLAMA_4), tokens),
    "Mixtral": _causal("Mixtral", num_local_experts=4),
    "Qwen3-MoE": _causal("Qwen3Moe", head_dim=8, num_experts=4, **_EXPERTS),
    "DeepSeek-V3": _causal(
        "DeepseekV3", num_key_value_heads=4, n_group=1, topk_group=1, first_k_dense_replace=1, **_DEEPSEEK
    ),
    "GPT-OSS": _causal("GptOss", head_dim=8, num_attention_heads=16, num_local_experts=16, num_experts_per_tok=2),
    "Mamba": Family(
        _of("MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2),
        tokens,
    ),
    "Jamba": _causal("Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, **_JAMBA),
    "Zamba2": _zamba2(),
    "Mamba 2": _mamba2(),
    "Bamba": _causal("Bamba", num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_chunk_size=8, **_SCAN),
    "Falcon-H1": _causal("FalconH1", head_dim=8, mamba_chunk_size=8, mamba_d_ssm=64, **_SCAN),
    "Qwen3-Next": _linear_attention(),
    "T5": _t5(),
    "BART": _bart(),
    "BERT": Family(
        _of("BertForMaskedLM", "BertConfig", **_WIDE, num_hidden_layers=2, intermediate_size=48, **_NO_DROPOUT), tokens
    ),
    "ALBERT": Family(
        _of(
            "AlbertForMaskedLM",
            "AlbertConfig",
            **_WIDE,
            embedding_size=16,
            num_hidden_layers=3,
            intermediate_size=48,
            **_NO_DROPOUT,
        ),
        tokens,
    ),
    "ModernBERT": _modern_bert(),
    "ViT": Family(_of("ViTForImageClassification", "ViTConfig", **_VISION, **_NO_DROPOUT, **_LABELS), classified),
    "Swin": _pyramid(
        "Swin", embed_dim=32, num_heads=[16, 16], window_size=4, drop_path_rate=0.0, hidden_dropout_prob=0.0
    ),
    "ConvNeXt": _pyramid("ConvNext", hidden_sizes=[16, 32], num_stages=2),
    "Whisper": _whisper(),
    "wav2vec 2": _wav2vec2(),
    "CLIP": _clip(),
    "SigLIP": _siglip(),
    "LLaVA": _llava(),
}
