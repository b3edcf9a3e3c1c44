"""Schema of the parallel axes beside data: tensors, pipeline stages, experts; and of compilation."""

from typing import Annotated, Any, ClassVar, Literal

from dsrun.config.knob import Auto, Section, Status, knob, unset
from dsrun.config.values import Count, Flag, Names, Positive, Real

_TP = "cut layers over ranks (tensor parallelism)"
_PP = "cut the model into pipeline stages"
_EP = "spread experts over ranks"


class TensorParallelGroup(Section):
    """DeepSpeed's inner `tp` object, which it accepts and ignores."""

    default_status = Status.PLANNED
    default_reason = _TP

    tp_size: Annotated[Positive, knob("Ranks that share a layer.", unit="ranks")] = 1
    tp_grain_size: Annotated[Positive, knob("Cut at multiples of this.", unit="elements")] = 1


class TensorParallel(Section):
    """Layers cut over ranks."""

    default_status = Status.PLANNED
    default_reason = _TP
    renamed: ClassVar = {"tp_size": "autotp_size", "tensor_parallel": "tp"}

    autotp_size: Annotated[
        Count, knob("Ranks that share a layer; 0 or 1 for none.", unit="ranks", idle=(0, 1), users=(3, 2))
    ] = 0
    preset_model: Annotated[
        Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None,
        knob("Known model whose layers are cut by a prepared plan.", harmless=True),
    ] = None
    tp_overlap_comm: Annotated[Flag, knob("Communicate while the next layer computes.", harmless=True)] = False
    partition_config: Annotated[dict[str, Any] | None, knob("Which layers are cut by row or column.")] = None
    dtype: Annotated[str | None, knob("Format of the cut layers.", harmless=True)] = None
    tp: Annotated[TensorParallelGroup, knob("Size of the group.")] = unset(TensorParallelGroup)
    injection_policy_tuple: Annotated[tuple[str, ...] | None, knob("Layers that are replaced.", harmless=True)] = None
    keep_module_on_host: Annotated[Flag, knob("Cut on the CPU.", harmless=True)] = False
    kernel_inject: Annotated[Flag, knob("Replace layers by fused ones.", harmless=True)] = False
    vocab_parallel_lm_head: Annotated[Flag, knob("Cut the output layer over the vocabulary.")] = False
    vocab_parallel_ce_backend: Annotated[
        Literal["torch", "liger"], knob("Loss over a cut vocabulary.", harmless=True)
    ] = "torch"


class Pipeline(Section):
    """Pipeline stages."""

    default_status = Status.PLANNED
    default_reason = _PP
    dropped: ClassVar = {
        "stages": "the script's PipelineModule decides it",
        "partition": "the script's PipelineModule decides it",
        "seed_layers": "the script's PipelineModule decides it",
    }

    pipe_partitioned: Annotated[Flag, knob("Cut activations between stages over ranks.", harmless=True)] = True
    grad_partitioned: Annotated[Flag, knob("Cut gradients between stages over ranks.", harmless=True)] = True
    activation_checkpoint_interval: Annotated[Count, knob("Recompute every this many layers.", unit="layers")] = 0
    use_reentrant: Annotated[Flag, knob("torch's older way of recomputing.", harmless=True)] = True


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
