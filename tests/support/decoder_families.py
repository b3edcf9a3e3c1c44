"""A tiny random model of every transformers configuration that has a plan for pipeline stages. Trains nothing.

Sizes are taken by the names that configurations give them; what a family needs beside that stands in `SPECIAL`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

VOCAB = 64
LAYERS = 2

#: Values by name, for every configuration that has the name.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "o_lora_rank": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
#: Values by the name of the configuration.


def _rotary_3d(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


_GLOBAL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "Cosmos3EdgeTextConfig",
            "Glm4vTextConfig",
            "Qwen2_5OmniTextConfig",
            "Qwen2_5_VLTextConfig",
            "Qwen2VLTextConfig",
            "PaddleOCRTextConfig",
        ),
        _rotary_3d(2, 1, 1),
    ),
    **dict.fromkeys(("Glm4vMoeTextConfig", "GlmImageTextConfig", "GlmOcrTextConfig"), _rotary_3d(1, 1, 0)),
    "CohereCompassTextConfig": {
        **_GLOBAL,
        "rope_parameters": {kind: {**_ROPE, "mrope_section": [1, 1, 2]} for kind in _GLOBAL["layer_types"]},
    },
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "EsmcConfig": {"num_key_value_heads": 4},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [16, 16], **_rotary_3d(1, 1, 2)},
    "Gemma4TextConfig": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
    "Gemma3nTextConfig": {
        **_GLOBAL,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
    },
    "Glm5NextTextConfig": {
        "num_key_value_heads": 4,
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "HiggsAudioV2Config": {"num_codebooks": 2, "codebook_size": 32, "audio_stream_eos_id": 33, "audio_token_id": 3},
    "InklingTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "d_rel": 4,
    },
    "KimiLinearConfig": {"linear_head_dim": 8, "linear_num_heads": 4},
    "LongcatFlashConfig": {"num_layers": LAYERS, "zero_expert_num": 2},
    "MiniMaxM3VLTextConfig": {
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "index_block_size": 4,
        "rotary_dim": 4,
    },
    "MuseSparkTextConfig": {"moe_hidden_size": 16},
    "NeoMMEConfig": {
        **_GLOBAL,
        "rope_parameters": {kind: {**_ROPE, "partial_rotary_factor": 0.5} for kind in _GLOBAL["layer_types"]},
    },
    "Phi4MultimodalConfig": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "crop_size": 16,
            "patch_size": 8,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 16,
        },
    },
}
#: Names of models that their configuration does not lead to.
MODELS: dict[str, str] = {"PaddleOCRTextConfig": "PaddleOCRTextModel"}
#: Configurations that are not a decoder of text of their own.
NO_DECODER: dict[str, str] = {
    "DeepseekOcr2VisionEncoderConfig": "an encoder of images, without a model of its own",
    "Ernie4_5_VL_MoeTextConfig": "an older name of Ernie4_5_VLMoeTextConfig",
    "Qwen3OmniMoeTalkerCodePredictorConfig": "takes steps of generation alone",
    "Qwen3OmniMoeTalkerTextConfig": "reads names of another configuration, and is built by that alone",
    "T5GemmaModuleConfig": "half of an encoder and decoder",
    "T5Gemma2TextConfig": "half of an encoder and decoder",
    "T5Gemma2DecoderConfig": "half of an encoder and decoder",
    "VoxtralRealtimeTextConfig": "takes times of audio, and is built by its whole model alone",
}


@cache
def configurations(plan: str = "base_model_pp_plan") -> dict[str, Any]:
    """Returns the classes of configurations that have a plan, by name: of stages, or `base_model_tp_plan` of layers."""
    import transformers

    found: dict[str, Any] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if plan not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name, value in vars(module).items():
            is_own = inspect.isclass(value) and value.__module__ == module.__name__
            if is_own and getattr(value, plan, None):
                found[name] = value
    return found


def one_of_each_kind(found: dict[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    """Returns the first configuration of each set of styles and of each plan of stages, and those named in `also`."""
    kinds: dict[object, str] = {}
    for name, config in found.items():
        for plan in ("base_model_tp_plan", "base_model_pp_plan"):
            rules = getattr(config, plan, None) or {}
            styles = set(rules.values()) if plan == "base_model_tp_plan" else rules.items()
            kinds.setdefault((plan, *sorted(map(str, styles))), name)
    return {name: config for name, config in found.items() if name in also or name in kinds.values()}


def model_class(config: Any) -> Any:
    """Returns the class of a configuration's language model, or of its bare model where there is none."""
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    from transformers import PreTrainedModel

    if config.__name__ in MODELS:
        return getattr(module, MODELS[config.__name__])
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.config_class is config
        and "forward" in vars(value)
    ]
    for ending in ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "Model", ""):
        for value in classes:
            if value.__name__.endswith(ending) and not value.__name__.endswith("PreTrainedModel"):
                return value
    raise LookupError(f"{config.__name__} has no model")


def tiny(config: Any) -> nn.Module:
    """Returns a tiny model of a configuration, with random values and no randomness in forward."""
    names = {name for cls in config.__mro__ for name in vars(cls).get("__annotations__", {})}
    values = {name: value for name, value in SIZES.items() if name in names} | SPECIAL.get(config.__name__, {})
    if "qk_nope_head_dim" in names:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups
    return model_class(config)._from_config(config(**values))


def decoders() -> dict[str, Any]:
    """Returns the configurations of decoders of text that have a plan of stages, by name."""
    return {name: config for name, config in configurations().items() if name not in NO_DECODER}


def results(configs: dict[str, Any]) -> dict[str, str]:
    """Returns, by configuration, `passes`, `refused: REASON` or how the two stages differ from the whole model."""
    import torch

    from dsrun.errors import DsrunError

    from .chunk_by_chunk import cut_on_ranks, different, grads_of

    found: dict[str, str] = {}
    for name, config in configs.items():
        torch.manual_seed(3)
        model = tiny(config).train()
        ids = torch.randint(3, VOCAB, (2, 8))
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if "labels" in inspect.signature(model.forward).parameters:
            given["labels"] = ids
        loss = loss_of(model(**given))
        loss.backward()
        grads = grads_of(model)
        for param in model.parameters():
            param.grad = None
        try:
            chunks = cut_on_ranks(model, (0, 1), partition="uniform")
            output = chunks.run(((), given), loss_of=loss_of)
        except DsrunError as error:
            found[name] = f"refused: {error}"
            continue
        wrong = different(grads, chunks.grads())
        if not torch.equal(loss, loss_of(output)):
            found[name] = f"loss {float(loss)} and {float(loss_of(output))}"
        else:
            found[name] = f"gradients of {', '.join(wrong[:4])}" if wrong else "passes"
    return found


def loss_of(output: Any) -> Any:
    """Returns a model's loss, or a number made of its first output where it has none."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    first = next(value for value in output.to_tuple() if value.is_floating_point())
    return first.float().square().mean()


if __name__ == "__main__":
    for one, result in results(decoders()).items():
        print(f"{one:40} {result}")
