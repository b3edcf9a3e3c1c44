"""Shape of a decoder-only transformer, and how many parameters that makes. Reads transformers' config.json keys.

Counts follow the modules of Hugging Face transformers, so published parameter counts come out to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.errors import ModelError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer.

    Attributes:
        layers: blocks.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than `heads` with grouped queries.
        head_dim: width of a head.
        vocab: rows of the embedding.
        gated: the MLP has a gate (SwiGLU: three matrices and not two).
        tied: embedding and output layer share one matrix.
        layer_norm: norms are LayerNorm with weight and bias; else RMSNorm.
        qkv_bias: queries, keys and values have biases.
        other_bias: the other linear layers of a block have biases.
        qk_norm: queries and keys have a norm over `head_dim`.
        positions: rows of a learned position embedding; 0 for none.
        max_positions: longest sequence the model is made for, where known.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    layer_norm: bool = False
    qkv_bias: bool = False
    other_bias: bool = False
    qk_norm: bool = False
    positions: int = 0
    max_positions: int | None = None

    @property
    def norm_numel(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.layer_norm else 1)

    @property
    def embedding_numel(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab * self.hidden

    @property
    def attention_width(self) -> int:
        """Width of queries and of attention's output, all heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values, all heads together."""
        return self.kv_heads * self.head_dim

    def deals_heads_to(self, ranks: int) -> bool:
        """Whether so many tensor-parallel ranks can have whole heads each, as the runtime deals them.

        Heads of keys go with their queries, unevenly where they do not divide; with fewer of them than ranks, several
        ranks use one, and have as many queries each.

        Args:
            ranks: ranks that share a layer.
        """
        return self.kv_heads >= ranks or (ranks % self.kv_heads == 0 and self.heads % ranks == 0)

    def widths_on_rank(self, ranks: int) -> tuple[int, int]:
        """Returns the widths of queries, and of keys, on the rank that has most of a layer.

        Heads are dealt whole, keys with their queries; ranks beyond the heads of keys share these, and each works with
        one.

        Args:
            ranks: ranks that share the layer.
        """
        if self.kv_heads < ranks:
            return -(-self.heads // ranks) * self.head_dim, self.head_dim
        groups = -(-self.kv_heads // ranks)
        return groups * (self.heads // self.kv_heads) * self.head_dim, groups * self.head_dim

    def most_of_block(self, ranks: int) -> int:
        """Returns the parameters of one block's matrices on the rank that has most of them.

        Args:
            ranks: ranks that share the block.
        """
        queries, keys = self.widths_on_rank(ranks)
        biases = queries + 2 * keys if self.qkv_bias else 0
        mlp = (3 if self.gated else 2) * self.hidden * -(-self.intermediate // ranks)
        return 2 * self.hidden * (queries + keys) + biases + mlp

    def block_attention_flops(self, sequence: int) -> float:
        """Returns the FLOPs of one block's causal attention in the forward of a token.

        Two products of queries and keys, and of scores and values; a token sees half of the others in the mean.

        Args:
            sequence: tokens of a sequence.
        """
        return 2.0 * self.attention_width * sequence

    @property
    def kv_numel(self) -> int:
        """Parameters of one block that make keys and values."""
        return 2 * self.kv_width * (self.hidden + (1 if self.qkv_bias else 0))

    @property
    def block_numel(self) -> int:
        """Parameters of one block."""
        projected = self.attention_width + 2 * self.kv_width
        attention = self.hidden * projected + self.attention_width * self.hidden
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        biases = projected if self.qkv_bias else 0
        if self.other_bias:
            biases += 2 * self.hidden + (2 if self.gated else 1) * self.intermediate
        norms = 2 * self.norm_numel + (2 * self.head_dim if self.qk_norm else 0)
        return attention + mlp + biases + norms

    @property
    def uncut_block_numel(self) -> int:
        """Parameters of one block that tensor parallelism leaves whole: norms, and biases of layers that are summed."""
        norms = 2 * self.norm_numel + (2 * self.head_dim if self.qk_norm else 0)
        return norms + (2 * self.hidden if self.other_bias else 0)

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.embedding_numel * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + self.layers * self.block_numel + self.norm_numel


#: Our name of a size -> the keys transformers uses for it, the common one first.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
}
_OPTIONAL = (
    "intermediate_size",
    "n_inner",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "n_positions",
)
#: Sizes above these are slips; they would also cost time, for layers are listed one by one.
_MOST: Mapping[str, int] = {"num_hidden_layers": 10_000}
_MOST_OF_ANY = 10**9
#: `model_type`s whose modules the counts follow.
_COUNTED = ("gemma", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LATENT = ("kv_lora_rank",)
_TIED_BY_DEFAULT = ("gpt2", "gemma", "gemma2", "gemma3_text")


def from_transformers(config: Mapping[str, Any], *, source: str) -> Architecture:
    """Reads the shape from a transformers config.

    Args:
        config: the object in config.json.
        source: name of the config in messages.

    Raises:
        ModelError: sizes are missing or no whole numbers, or the model is a mixture of experts or has latent
            attention, whose parameters these keys do not tell.
    """
    experts = next((key for key in _EXPERTS if _whole(config.get(key)) and config[key] > 1), None)
    if experts is not None:
        raise ModelError(
            f"{source}: `{experts}` is {config[experts]}; mixtures of experts are not counted from a config.json",
            hint="give the number of parameters, e.g. `47B`, or `module:callable`",
        )
    latent = next((key for key in _LATENT if _whole(config.get(key))), None)
    if latent is not None:
        raise ModelError(
            f"{source}: `{latent}` is {config[latent]}; latent attention is not counted from a config.json",
            hint="give the number of parameters, e.g. `16B`, or `module:callable`",
        )
    _refuse_other_kinds(config, source)
    problems: list[Problem] = []
    sizes = {name: _size(config, keys, source, problems) for name, keys in _KEYS.items()}
    optional = {key: _optional(config, key, source, problems) for key in _OPTIONAL}
    hidden, heads = sizes["hidden"], sizes["heads"]
    if not problems and optional["head_dim"] is None and heads > hidden:
        problems.append(Problem(f"{source}: {heads:,} attention heads are more than the width of {hidden:,}"))
    tied = config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        problems.append(Problem(f"{source}: `tie_word_embeddings` is {str(tied)[:40]}; expected true or false"))
    if problems:
        raise ModelError.of(problems)
    kind = str(config.get("model_type", "llama"))
    is_gpt2, is_neox = kind == "gpt2" or "n_embd" in config, kind == "gpt_neox"
    plain = is_gpt2 or is_neox
    head_dim = optional["head_dim"] or hidden // heads
    longest = optional["max_position_embeddings"] or optional["n_positions"]
    attention_bias = bool(config.get("attention_bias", is_neox)) or is_gpt2 or kind in ("qwen2", "qwen")
    return Architecture(
        layers=sizes["layers"],
        hidden=hidden,
        intermediate=optional["intermediate_size"] or optional["n_inner"] or 4 * hidden,
        heads=heads,
        kv_heads=optional["num_key_value_heads"] or heads,
        head_dim=head_dim,
        vocab=sizes["vocab"],
        gated=not plain,
        tied=(kind in _TIED_BY_DEFAULT or is_gpt2) if tied is None else tied,
        layer_norm=plain,
        qkv_bias=attention_bias,
        other_bias=plain,
        qk_norm=kind == "qwen3",
        positions=(longest or 1024) if is_gpt2 else 0,
        max_positions=longest,
    )


def assumptions(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what `from_transformers` takes for granted of a config, a sentence each."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in _COUNTED:
        return ()
    return (f"`model_type` is `{kind[:40]}`, whose layers are not known here: counted as Llama's",)


def _refuse_other_kinds(config: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for what is no decoder of text alone."""
    hint = "give the number of parameters, e.g. `7B`, or `module:callable`"
    if config.get("is_encoder_decoder") is True:
        raise ModelError(f"{source}: an encoder with a decoder is not counted from a config.json", hint=hint)
    if isinstance(config.get("text_config"), Mapping) and not any(key in config for key in _KEYS["hidden"]):
        raise ModelError(
            f"{source}: the sizes are in `text_config`; a model of more than text is not counted from a config.json",
            hint=hint,
        )


def _size(config: Mapping[str, Any], keys: tuple[str, ...], source: str, problems: list[Problem]) -> int:
    key = next((key for key in keys if key in config), None)
    if key is None:
        problems.append(
            Problem(
                f"{source}: `{keys[0]}` is missing",
                "expected a transformers config.json of a decoder-only model" if not problems else None,
            )
        )
        return 1
    value = _whole(config[key])
    if value is None:
        problems.append(Problem(f"{source}: `{key}` is {str(config[key])[:40]}; expected a whole number above 0"))
        return 1
    if value > _MOST.get(keys[0], _MOST_OF_ANY):
        problems.append(Problem(f"{source}: `{key}` is {_short(value)}; no model has that many"))
        return 1
    return value


def _optional(config: Mapping[str, Any], key: str, source: str, problems: list[Problem]) -> int | None:
    """Returns a size that may be missing or null; anything else but a size is told, not replaced."""
    given = config.get(key)
    if given is None:
        return None
    value = _whole(given)
    if value is None:
        problems.append(Problem(f"{source}: `{key}` is {str(given)[:40]}; expected a whole number above 0"))
    elif value > _MOST_OF_ANY:
        problems.append(Problem(f"{source}: `{key}` is {_short(value)}; no model has that many"))
        return None
    return value


def _short(value: int) -> str:
    return f"{value:,}" if value < 10**15 else "above 10^15"


def _whole(value: Any) -> int | None:
    """The value as a whole number above 0; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
