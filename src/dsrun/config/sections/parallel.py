"""Schema of the parallel axes beside data: tensors, pipeline stages, experts; and of compilation."""

import re
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field

from dsrun.config.knob import Auto, Section, Status, knob, unset
from dsrun.config.values import Count, CountOrAuto, Dtype, Flag, Names, Positive, PositiveOrAuto, Real
from dsrun.pipeline_schedules.generate import ScheduleName

_EP = "spread experts over ranks"
_BY_CLASS = "type:"
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def _as_partition(value: object) -> object:
    """Reads DeepSpeed's spellings, any case and `best` for the default, and a list as bounds."""
    if isinstance(value, list):
        bounds = tuple(cast("list[object]", value))
        whole = [number for number in bounds if isinstance(number, int) and not isinstance(number, bool)]
        if whole != list(bounds) or len(whole) < 2 or whole[0] != 0 or whole != sorted(set(whole)):
            raise ValueError("no bounds")
        return bounds
    if not isinstance(value, str):
        return value
    if not value.lower().startswith(_BY_CLASS):
        return "cost" if value.lower() == "best" else value.lower()
    try:
        re.compile(value[len(_BY_CLASS) :])
    except re.error as error:
        raise ValueError("no regular expression") from error
    return _BY_CLASS + value[len(_BY_CLASS) :]


PartitionMethod: TypeAlias = Annotated[
    Literal["cost", "parameters", "uniform"] | Annotated[str, Field(pattern=f"^{_BY_CLASS}.")] | tuple[int, ...],
    BeforeValidator(_as_partition),
]


def _in_lower_case(value: object) -> object:
    """Reads any case, as DeepSpeed does."""
    return value.lower() if isinstance(value, str) else value


def _as_dtype(value: object) -> object:
    """Reads torch's names of formats beside the short ones."""
    return _DTYPES.get(value.removeprefix("torch.").lower(), value) if isinstance(value, str) else value


def _as_shape(value: object) -> object:
    """Reads a shape: whole numbers or -1, and one list of lengths in place of a number."""
    if not isinstance(value, list):
        return value
    found: list[int | tuple[int, ...]] = []
    for item in cast("list[object]", value):
        inner = cast("list[object]", item) if isinstance(item, list) else None
        lengths = [item] if inner is None else inner
        least = -1 if inner is None else 1
        whole = [number for number in lengths if isinstance(number, int) and not isinstance(number, bool)]
        if whole != lengths or not whole or any(number < least or number == 0 for number in whole):
            raise ValueError("no length")
        found.append(whole[0] if inner is None else tuple(whole))
    if not found or sum(isinstance(item, tuple) for item in found) > 1:
        raise ValueError("no shape")
    return tuple(found)


class TensorParallelGroup(Section):
    """DeepSpeed's inner `tp` object: the size once more."""

    dropped: ClassVar = {
        "mpu": "ranks are divided by the sizes of the axes",
        "tp_group": "ranks are divided by the sizes of the axes",
    }

    tp_size: Annotated[
        Positive, knob("Ranks that share a layer, where `autotp_size` does not say it.", unit="ranks")
    ] = 1
    tp_grain_size: Annotated[
        Positive,
        knob(
            "Cut at multiples of this.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="parts are as even as whole heads allow, in DeepSpeed's training too",
        ),
    ] = 1


class LayerSpec(Section):
    """How layers are cut whose parameters have matching names; of several specs that match, the first counts."""

    patterns: Annotated[
        Names,
        knob(
            "Regular expressions that a parameter's whole name begins with, `.weight` or `.bias` included.",
            expects="a regular expression, or a list of them",
        ),
    ] = ()
    partition_type: Annotated[
        Annotated[Literal["column", "row", "skip"], BeforeValidator(_in_lower_case)],
        knob("Cut outputs (`column`), or inputs (`row`, behind a column), or leave whole (`skip`)."),
    ] = "column"
    shape: Annotated[
        Annotated[tuple[int | tuple[int, ...], ...], BeforeValidator(_as_shape)] | None,
        knob(
            "Shape in which the weight is looked at, for parts that stand side by side and are each cut: [2, -1] for "
            "gate and up, [[q, k, v], -1] for three of unlike length. -1: as the weight has it.",
            expects="a list of whole numbers or -1, one of which may be a list of lengths",
        ),
    ] = None
    partition_dim: Annotated[
        Count | None, knob("Dim of `shape` that is cut, or has the parts; 0 for `column` and 1 for `row` if not set.")
    ] = None
    gather_output: Annotated[Flag, knob("Put the outputs of a `column` together behind it.")] = False
    grad_allreduce: Annotated[
        Flag, knob("Sum the gradients of a layer that is skipped, for it works on parts: a norm of heads.")
    ] = False
    model_types: Annotated[
        Names | None, knob("Values of the model's `config.model_type` for which the rule counts; all if not set.")
    ] = None


class PartitionConfig(Section):
    """Which layers are cut, and how."""

    dropped: ClassVar = {
        "tp_size": "`tensor_parallel.autotp_size` says how many ranks share a layer",
        "embedding_partition_dim": "nothing reads it, in DeepSpeed either; embeddings have rules as Linears have",
    }

    use_default_specs: Annotated[Flag, knob("Try the rules of `preset_model` behind these.")] = True
    strict_mode: Annotated[Flag, knob("Refuse a model with a Linear that no rule matches.")] = False
    layer_specs: Annotated[tuple[LayerSpec, ...], knob("Rules, tried in order.", expects="a list of objects")] = ()
    lm_head_patterns: Annotated[
        Names, knob("Last parts of names that an output layer may have, for `vocab_parallel_lm_head`.")
    ] = ("lm_head", "embed_out")


class TensorParallel(Section):
    """Layers cut over ranks."""

    renamed: ClassVar = {
        "tp_size": "autotp_size",
        "tensor_parallel": "tp",
        "replace_with_kernel_inject": "kernel_inject",
    }

    autotp_size: Annotated[
        CountOrAuto,
        knob(
            "Ranks that share a layer; 0 or 1 for none; auto: as many as `dsrun plan` finds fastest for the model of "
            "`--model`, or of the script's last run.",
            unit="ranks",
            effect="parameters, gradients, states and most activations are divided by it; two sums over ranks a layer "
            "in forward and in backward",
            idle=(0, 1),
            users=(3, 2),
        ),
    ] = 0
    preset_model: Annotated[
        Annotated[
            Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
            BeforeValidator(_in_lower_case),
        ]
        | None,
        knob("Known model whose rules are used, in place of the model's own plan."),
    ] = None
    tp_overlap_comm: Annotated[
        Flag, knob("Sum gradients of inputs over ranks while gradients of weights are computed.", effect="speed")
    ] = False
    partition_config: Annotated[
        PartitionConfig | None, knob("Rules that say which layers are cut, in place of the model's own plan.")
    ] = None
    dtype: Annotated[
        Annotated[Dtype, BeforeValidator(_as_dtype)] | None,
        knob("Format of the model; `bf16` and `fp16` say it, and another one here is refused."),
    ] = None
    tp: Annotated[TensorParallelGroup, knob("Size of the group.")] = unset(TensorParallelGroup)
    vocab_parallel_lm_head: Annotated[
        Flag | None,
        knob(
            "Keep the output layer's results cut over the vocabulary, and compute the loss of the parts (true), or put "
            "them together (false); unset: cut where the model's own plan and its loss allow it.",
        ),
    ] = None
    vocab_parallel_ce_backend: Annotated[
        Literal["torch", "liger"],
        knob(
            "Loss over a cut vocabulary.",
            status=Status.NO_MEANING,
            reason="there is one such loss, which has a part of the logits at a time",
        ),
    ] = "torch"
    sequence_parallel: Annotated[
        Flag,
        knob(
            "Norms and dropout between cut layers work on slices of the sequence, which has to divide by the ranks.",
            effect="activations between cut layers are divided by the ranks; as many bytes are sent",
        ),
    ] = False
    exact: Annotated[
        Flag,
        knob(
            "Multiply whole matrices, so that results have the bits of one rank: for tests.",
            effect="saves no compute, and gathers weights and inputs of every layer",
        ),
    ] = False
    check: Annotated[
        Flag,
        knob(
            "Compare cut blocks with whole ones in the first forward, and what ranks that share layers do at each step."
        ),
    ] = True
    injection_policy_tuple: Annotated[
        Names | None,
        knob(
            "Layers that are replaced.",
            status=Status.NO_MEANING,
            reason="layers are found by plans; `partition_config` names them",
        ),
    ] = None
    keep_module_on_host: Annotated[
        Flag,
        knob("Cut on the CPU.", status=Status.NO_MEANING, reason="weights are cut where they are"),
    ] = False
    kernel_inject: Annotated[
        Flag,
        knob("Replace layers by fused ones.", status=Status.NO_MEANING, reason="layers keep their own forward"),
    ] = False

    @property
    def size(self) -> int:
        """Ranks that share a layer; 1 for none, and where it is left to a plan that nobody has made."""
        return max(1, 0 if self.autotp_size == "auto" else self.autotp_size, self.tp.tp_size)


class Pipeline(Section):
    """Pipeline stages: neighbouring layers on each rank, micro batches passing through them."""

    stages: Annotated[
        PositiveOrAuto,
        knob(
            "Stages that the layers are shared out to; auto: as many as the script's PipelineModule has, else as many "
            "as `dsrun plan` finds fastest for the model of `--model`, or of the script's last run, else 1.",
            unit="ranks",
            effect="parameters, gradients and states of a rank are divided by it; ranks wait at both ends of a batch",
        ),
    ] = "auto"
    partition: Annotated[
        PartitionMethod,
        knob(
            "How layers become chunks: equal time (`cost`, which counts embedding and head), equal `parameters`, equal "
            "numbers (`uniform`), equal numbers of layers whose class matches (`type:REGEX`), or the first layer of "
            "each chunk and the number of layers.",
            expects='"cost", "parameters", "uniform", "type:REGEX" with a regular expression, or a list of whole '
            "numbers, 0 first and each larger than the one before",
        ),
    ] = "cost"
    schedule: Annotated[
        Literal["auto", "gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble", "zbv"],
        knob(
            "Order of forwards and backwards on each rank; auto: 1f1b, or interleaved with several `virtual_stages`.",
            effect="time that ranks wait, and micro batches whose activations they hold; never a result",
        ),
    ] = "auto"
    virtual_stages: Annotated[
        Positive,
        knob(
            "Chunks of layers on each rank; zbv has 2 by itself.",
            unit="chunks",
            effect="ranks wait as many times less, and send as many times more",
        ),
    ] = 1
    boundary_dtype: Annotated[
        Dtype | None, knob("Format in which activations travel between stages; none leaves them as they are.")
    ] = None
    activation_checkpoint_interval: Annotated[
        Count,
        knob("Layers of a stage that are computed again together in backward; 0: none.", unit="layers"),
    ] = 0
    seed_layers: Annotated[
        Literal["auto"] | Flag,
        knob(
            "Random numbers of dropout by layer and micro batch, so that they do not depend on the stages; auto: where "
            "there are several stages."
        ),
    ] = "auto"
    pipe_partitioned: Annotated[Flag, knob("Accepted, and changes nothing: what travels between stages is whole.")] = (
        True
    )
    grad_partitioned: Annotated[
        Flag, knob("Accepted, and changes nothing: gradients that travel between stages are whole.")
    ] = True
    use_reentrant: Annotated[Flag, knob("Accepted, and changes nothing: there is one way of recomputing.")] = True

    @property
    def count(self) -> int:
        """Number of stages; 1 where it is left to a script or a plan that say none."""
        return 1 if self.stages == "auto" else self.stages

    @property
    def schedule_name(self) -> ScheduleName:
        """The schedule, with `auto` resolved."""
        if self.schedule == "auto":
            return "interleaved" if self.virtual_stages > 1 else "1f1b"
        return self.schedule

    @property
    def chunks_per_rank(self) -> int:
        """Chunks of layers on each rank: `virtual_stages`, and 2 with zbv."""
        return 2 if self.schedule_name == "zbv" else self.virtual_stages

    @property
    def chunks(self) -> int:
        """Chunks of the whole model."""
        return self.count * self.chunks_per_rank

    @property
    def takes_turns(self) -> bool:
        """Whether a chunk is through with all micro batches before the next one on its rank begins."""
        return self.count > 1 and self.schedule_name == "breadth_first" and self.chunks_per_rank > 1

    @property
    def seeds_layers(self) -> bool:
        """Whether random numbers of dropout go by layer and micro batch, with `auto` resolved."""
        return self.count > 1 if self.seed_layers == "auto" else self.seed_layers


class ExpertParallel(Section):
    """Experts of a mixture spread over ranks."""

    default_status = Status.PLANNED
    default_reason = _EP
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Spread experts over ranks.")] = False
    autoep_size: Annotated[Positive, knob("Ranks that share the experts.", unit="ranks")] = 1
    expert_tensor_parallel_size: Annotated[Positive, knob("Ranks that share one expert.", unit="ranks")] = 1
    preset_model: Annotated[
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None,
        knob("Known model whose experts are found by a prepared plan."),
    ] = None
    moe_layer_pattern: Annotated[str | None, knob("Pattern of the names of mixture layers.")] = None
    router_pattern: Annotated[str | None, knob("Pattern of the router's name.")] = None
    expert_pattern: Annotated[str | None, knob("Pattern of the experts' names.")] = None
    expert_w1: Annotated[str | None, knob("Name of the gate weight.")] = None
    expert_w2: Annotated[str | None, knob("Name of the down weight.")] = None
    expert_w3: Annotated[str | None, knob("Name of the up weight.")] = None
    num_experts_attr: Annotated[str | None, knob("Attribute with the number of experts.")] = None
    top_k_attr: Annotated[str | None, knob("Attribute with the experts per token.")] = None
    has_shared_experts: Annotated[Flag | None, knob("The layer has experts that every token uses.")] = None
    shared_experts_pattern: Annotated[str | None, knob("Pattern of their names.")] = None
    shared_experts_gate_pattern: Annotated[str | None, knob("Pattern of their gate's name.")] = None
    route_norm: Annotated[Flag | None, knob("Normalise the routing weights.")] = None
    num_expert_groups: Annotated[Positive | None, knob("Groups of experts.", unit="groups")] = None
    num_limited_groups: Annotated[Positive | None, knob("Groups a token may use.", unit="groups")] = None
    load_balance_coeff: Annotated[Real | None, knob("Weight of the balancing loss.")] = None
    use_grouped_mm: Annotated[Flag, knob("Multiply all experts in one call.")] = True
    disable_triton_grouped_mm: Annotated[Flag, knob("Leave Triton's version out.")] = False
    score_func: Annotated[Literal["auto", "softmax", "sigmoid"], knob("Scores of the router.", auto=Auto.DEFAULT)] = (
        "auto"
    )
    score_apply: Annotated[
        Literal["auto", "pre", "post"], knob("Scale before or after the expert.", auto=Auto.DEFAULT)
    ] = "auto"
    route_scale: Annotated[Real, knob("Factor on routing weights.")] = 1.0
    top_k: Annotated[Literal["auto"] | Positive, knob("Experts per token.", unit="experts", auto=Auto.DEFAULT)] = "auto"
    routed_scaling_factor: Annotated[Literal["auto"] | Real, knob("Factor on the experts' sum.", auto=Auto.DEFAULT)] = (
        "auto"
    )
    combine_impl: Annotated[
        Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"],
        knob("How the experts' outputs are added.", auto=Auto.DEFAULT),
    ] = "auto"
    validate_folding_routing: Annotated[Flag, knob("Check that all ranks route alike.")] = False
    async_split_plan: Annotated[Flag | None, knob("Plan the exchange beside compute.")] = None
    row_weighting_impl: Annotated[str | None, knob("Kernel that weights rows.")] = None
    gate_up_impl: Annotated[str | None, knob("Kernel of gate and up.")] = None
    comm_backend: Annotated[str | None, knob("Library of the exchange.")] = None
    comm_num_sm: Annotated[Count | None, knob("GPU processors used by the exchange.", unit="processors")] = None
    comm_qp_margin: Annotated[Count | None, knob("Spare queues of the exchange.", unit="queues")] = None
    comm_max_tokens_per_rank: Annotated[Count | None, knob("Most tokens a rank sends.", unit="tokens")] = None
    expert_activation: Annotated[str | None, knob("Activation inside experts.")] = None


class HybridEngine(Section):
    """Generation inside training."""

    default_status = Status.PLANNED
    default_reason = "switch between training and generation kernels"
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Generate with inference kernels between steps.")] = False
    max_out_tokens: Annotated[Positive, knob("Longest output.", unit="tokens")] = 512
    inference_tp_size: Annotated[Positive, knob("Ranks that share a layer while generating.", unit="ranks")] = 1
    release_inference_cache: Annotated[Flag, knob("Free the cache after generating.")] = False
    pin_parameters: Annotated[Flag, knob("Page-lock parameters.")] = True
    tp_gather_partition_size: Annotated[Positive, knob("Layers gathered at a time.", unit="layers")] = 8
    enable_cuda_graph: Annotated[Flag, knob("Replay generation as a CUDA graph.")] = False


class Compile(Section):
    """Compilation of the sharded model."""

    default_status = Status.PLANNED
    default_reason = "compile the sharded model"
    switch = ("deepcompile", False)
    dropped: ClassVar = {
        "backend": "hand the backend to `engine.compile`",
        "disable": "leave the section out",
    }

    deepcompile: Annotated[Flag, knob("Compile model and communication together.", users=(3, 2))] = False
    passes: Annotated[Names | None, knob("Passes to run: z1, z3, autosp, autotp.")] = None
    free_activation: Annotated[Flag, knob("Free activations early.")] = False
    free_activation_threshold: Annotated[Count, knob("Smallest activation to free.", unit="bytes")] = 10 << 20
    offload_activation: Annotated[Flag, knob("Move activations to the CPU.")] = False
    offload_activation_pin_memory: Annotated[Flag, knob("Page-lock their buffers.")] = True
    offload_opt_states: Annotated[Flag, knob("Move optimizer states to the CPU.")] = False
    offload_parameters: Annotated[Flag, knob("Move parameters to the CPU.")] = False
    double_buffer: Annotated[Flag, knob("Use two communication buffers.")] = True
    symmetric_memory: Annotated[Flag, knob("Use torch's symmetric memory.")] = False
    debug_log: Annotated[Flag, knob("Log the passes.")] = False
    sync_before_reduce: Annotated[Flag, knob("Wait before reducing.")] = False
    sync_after_reduce: Annotated[Flag, knob("Wait after reducing.")] = False
    sync_before_allgather: Annotated[Flag, knob("Wait before gathering.")] = False
    sync_after_allgather: Annotated[Flag, knob("Wait after gathering.")] = False
    keep_int_input_tensors: Annotated[Flag, knob("Keep integer inputs for backward.")] = True
    keep_all_input_tensors: Annotated[Flag, knob("Keep all inputs for backward.")] = False
    autoep_non_moe: Annotated[Flag, knob("Compile only what is outside the experts.")] = False
