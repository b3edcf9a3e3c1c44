"""Schema of `zero_optimization`: what is sharded, and the knobs of its communication."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from dsrun.config.knob import Auto, Section, Status, knob, unset
from dsrun.config.sections.offload import OffloadOptimizer, OffloadParam, OffloadPlacement
from dsrun.config.values import Count, CountOrAuto, Flag, Fraction, Names, Positive, as_whole

_MICS = "use `zero_hpz_partition_size` for shards inside a node"


class LeafModule(Section):
    """Modules whose parameters are gathered as one, e.g. blocks of experts of which a step uses a few."""

    default_status = Status.WORKS

    classes: Annotated[Names, knob("Class names of leaf modules.", stages=(3,))] = ()
    names: Annotated[Names, knob("Module names of leaf modules.", stages=(3,))] = ()
    name_suffixes: Annotated[Names, knob("Endings of module names of leaf modules.", stages=(3,))] = ()


class ZenFlow(Section):
    """Update the most important gradients at once and the rest on the CPU, later."""

    default_status = Status.PLANNED
    default_reason = "update gradients selectively (ZenFlow)"

    topk_ratio: Annotated[Fraction, knob("Share of gradient columns that count as important.", unit="fraction")] = 0.1
    select_strategy: Annotated[
        Literal["auto", "step", "epoch"], knob("When the important columns are chosen anew.", auto=Auto.DEFAULT)
    ] = "auto"
    select_interval: Annotated[
        Literal["auto"] | Positive, knob("Interval of the choice.", unit="steps or epochs", auto=Auto.DEFAULT)
    ] = "auto"
    update_interval: Annotated[
        Literal["auto"] | Positive, knob("Interval of the deferred update.", unit="steps", auto=Auto.DEFAULT)
    ] = "auto"
    overlap_step: Annotated[Flag, knob("Run the deferred update beside forward and backward.")] = False
    offload: Annotated[Flag, knob("Keep the selective states on the CPU as well.")] = False
    auto_ratio: Annotated[Fraction, knob("Threshold of the automatic update interval.", unit="fraction")] = 0.99
    full_warm_up_rounds: Annotated[Count, knob("Rounds with full updates at the start.", unit="rounds")] = 0
    pt_reserved_cores_perc: Annotated[
        Fraction, knob("Share of cores kept for the training process.", unit="fraction")
    ] = 0.5
    steps_per_epoch: Annotated[Count | None, knob("Updates per epoch, for the strategy `epoch`.", unit="steps")] = None


class ZeroOptimization(Section):
    """ZeRO: cut optimizer states, gradients and parameters over the data-parallel ranks."""

    default_status = Status.WORKS
    removed: ClassVar = {
        "mics_shard_size": _MICS,
        "mics_hierarchical_params_gather": _MICS,
        "zeropp_loco_param": "drop it; quantised gradients without error feedback are `zero_quantized_gradients`",
        "grad_hooks": "drop it; gradients are reduced from hooks always",
        "legacy_stage1": "drop it; there is one implementation of stage 1",
        "find_unused_parameters": "drop it; that is an option of DDP, and unused parameters are allowed here",
    }
    renamed: ClassVar = {
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "allgather_size": "allgather_bucket_size",
    }
    dropped: ClassVar = {
        "cpu_offload_use_pin_memory": "it never had an effect; write `offload_optimizer.pin_memory`",
        "elastic_checkpoint": "every checkpoint loads on any number of ranks",
    }

    stage: Annotated[
        Literal[0, 1, 2, 3],
        BeforeValidator(as_whole),
        knob(
            "What is sharded over the data-parallel ranks: 0 nothing, 1 optimizer states, 2 gradients too, "
            "3 parameters too.",
            effect="bytes per parameter on N ranks in bf16 with Adam: 20 at stage 0, 4 + 16/N at 1, 2 + 16/N at 2, "
            "18/N at 3; gradients are summed in fp32, 4 of these",
            users=(293, 45),
        ),
    ] = 0
    overlap_comm: Annotated[
        Flag | None,
        knob(
            "Communicate gradients while backward goes on.",
            effect="hides communication",
            status=Status.NO_MEANING,
            reason="gradients are always reduced while backward goes on",
            idle=(True,),
            differs="true at stage 3, else false",
            users=(189, 41),
        ),
    ] = None
    contiguous_gradients: Annotated[
        Flag,
        knob(
            "Keep gradients in one buffer, so that memory does not fragment.",
            status=Status.NO_MEANING,
            reason="gradients of a unit always share one buffer",
            idle=(True,),
            users=(187, 41),
        ),
    ] = True
    reduce_bucket_size: Annotated[
        CountOrAuto,
        knob(
            "Gradients reduced by one call.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="a unit's gradients are reduced in place, in the buffer that they share",
            idle=("auto",),
            auto=Auto.MODEL,
            users=(177, 37),
        ),
    ] = 500_000_000
    allgather_bucket_size: Annotated[
        CountOrAuto,
        knob(
            "Parameters gathered by one call after the step.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="a unit's parameters are gathered in place, into the buffer that they share",
            auto=Auto.DEFAULT,
            stages=(1, 2),
            users=(99, 24),
        ),
    ] = 500_000_000
    allgather_partitions: Annotated[
        Flag,
        knob(
            "Collect updated parameters by all-gather and not by broadcasts.",
            status=Status.NO_MEANING,
            reason="updated parameters are always all-gathered",
            idle=(True,),
            users=(98, 24),
        ),
    ] = True
    reduce_scatter: Annotated[
        Flag,
        knob(
            "Average gradients by reduce-scatter and not by all-reduce.",
            status=Status.NO_MEANING,
            reason="sharded gradients are always reduce-scattered",
            idle=(True,),
            users=(93, 22),
        ),
    ] = True
    use_multi_rank_bucket_allreduce: Annotated[
        Flag,
        knob(
            "Let one bucket hold gradients of several ranks.",
            status=Status.NO_MEANING,
            reason="the slices of all ranks always share one buffer",
            idle=(True,),
        ),
    ] = True
    round_robin_gradients: Annotated[
        Flag,
        knob(
            "Spread the copies of gradients to the CPU over the ranks.",
            status=Status.NO_MEANING,
            reason="every rank already holds an equal slice of every unit",
            stages=(1, 2),
            users=(6, 3),
        ),
    ] = False
    ignore_unused_parameters: Annotated[
        Flag,
        knob(
            "Allow parameters that backward never reaches.",
            status=Status.NO_MEANING,
            reason="they are always allowed; `step_unused_parameters` says what becomes of them",
            idle=(True,),
            stages=(2,),
        ),
    ] = True
    step_unused_parameters: Annotated[
        Flag,
        knob(
            "Step parameters that no rank has used since the last update with a gradient of zero, as DeepSpeed does: "
            "momentum and weight decay move them. False leaves them and their count of steps alone, as torch does.",
        ),
    ] = False
    load_from_fp32_weights: Annotated[
        Flag,
        knob(
            "Take master weights from the checkpoint's fp32 copy and not from its 16-bit one.",
            status=Status.NO_MEANING,
            reason="master weights are always loaded from their own fp32 copy",
            idle=(True,),
            users=(2, 2),
        ),
    ] = True
    compute_grad_norm: Annotated[
        Flag,
        knob(
            "Compute the gradient norm where clipping does not need it.",
            status=Status.PLANNED,
            reason="skip the norm",
            harmless=True,
            stages=(1, 2),
        ),
    ] = True
    parameter_alignment: Annotated[
        Flag,
        knob(
            "Align every parameter to 16 bytes.",
            status=Status.NO_MEANING,
            reason="the layout has its own alignment",
            stages=(1, 2),
        ),
    ] = False
    sub_group_size: Annotated[
        CountOrAuto,
        knob(
            "Parameters updated by one tile of the step.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="the step updates a rank's slices in place, without the copies whose size it would bound",
            auto=Auto.DEFAULT,
            stages=(3,),
            users=(83, 30),
        ),
    ] = 1_000_000_000
    stage3_max_live_parameters: Annotated[
        CountOrAuto | None,
        knob(
            "Most gathered parameters in memory at once.",
            unit="elements",
            effect="fewer slots, so that less is gathered ahead; a unit that is needed is gathered in any case",
            auto=Auto.DEFAULT,
            stages=(3,),
            differs="1,000,000,000; here what `stage3_prefetch_bucket_size` asks for",
            users=(91, 32),
        ),
    ] = None
    stage3_max_reuse_distance: Annotated[
        CountOrAuto,
        knob(
            "Keep a gathered parameter that is used again within this many.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="a gathered unit stays in its slot until another unit needs the slot",
            auto=Auto.DEFAULT,
            stages=(3,),
            users=(71, 30),
        ),
    ] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[
        CountOrAuto | None,
        knob(
            "Parameters gathered ahead of their use.",
            unit="elements",
            effect="units in memory beside the one that computes: as many of the largest as this holds, at least one; "
            "0: each unit is gathered when it is needed",
            auto=Auto.MODEL,
            stages=(3,),
            differs="50,000,000; here the next unit, of any size",
            users=(94, 33),
        ),
    ] = None
    stage3_param_persistence_threshold: Annotated[
        CountOrAuto,
        knob(
            "The trained or the frozen parameters of a unit stay gathered if they are no more than this together.",
            unit="elements",
            effect="trained ones are gathered once a step, frozen ones are not cut: fewer calls, more memory",
            auto=Auto.MODEL,
            stages=(3,),
            differs="100,000, of each parameter by itself",
            users=(96, 33),
        ),
    ] = 0
    stage3_model_persistence_threshold: Annotated[
        CountOrAuto,
        knob(
            "Most parameters that stay gathered, over the whole model.",
            unit="elements",
            auto=Auto.DEFAULT,
            stages=(3,),
        ),
    ] = (1 << 63) - 1
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Flag,
        knob(
            "Gather whole weights for `save_16bit_model`.",
            status=Status.NO_MEANING,
            reason="exporting whole weights never needs a switch",
            auto=Auto.DEFAULT,
            idle=(True,),
            users=(67, 31),
        ),
    ] = False
    stage3_module_granularity_threshold: Annotated[
        Count,
        knob(
            "Gather a module as one where its parameters are smaller than this.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="parameters are always gathered by unit",
            stages=(3,),
        ),
    ] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[
        Flag,
        knob(
            "Gather parameters by all-reduce.",
            status=Status.NO_MEANING,
            reason="parameters are gathered into place by all-gather",
            stages=(3,),
        ),
    ] = False
    stage3_allgather_sequential: Annotated[
        Flag,
        knob(
            "Gather parameters one by one.",
            status=Status.NO_MEANING,
            reason="parameters are always gathered by unit",
            stages=(3,),
        ),
    ] = False
    zero_hpz_partition_size: Annotated[
        Positive,
        knob(
            "Ranks of a node that keep a second, node-local shard of the parameters (ZeRO++).",
            unit="ranks",
            status=Status.PLANNED,
            reason="keep a second shard per node (ZeRO++)",
            stages=(3,),
            users=(2, 2),
        ),
    ] = 1
    zero_quantized_weights: Annotated[
        Flag,
        knob(
            "Gather parameters as int8 (ZeRO++).",
            status=Status.PLANNED,
            reason="quantise gathered parameters (ZeRO++)",
            stages=(3,),
            users=(2, 2),
        ),
    ] = False
    zero_quantized_gradients: Annotated[
        Flag,
        knob(
            "Reduce gradients as int4 (ZeRO++).",
            status=Status.PLANNED,
            reason="quantise gradients (ZeRO++)",
            stages=(3,),
            users=(2, 2),
        ),
    ] = False
    zero_quantized_nontrainable_weights: Annotated[
        Flag,
        knob(
            "Keep frozen parameters as int8 (ZeRO++).",
            status=Status.PLANNED,
            reason="quantise frozen parameters (ZeRO++)",
            stages=(3,),
        ),
    ] = False
    memory_efficient_linear: Annotated[
        Flag,
        knob(
            "Under `torch_autocast`, linear layers keep no 16-bit copy of their weight for backward.",
            effect="2 bytes less for each element of a linear layer's weight, one cast more in backward, the same "
            "bits; elsewhere no layer keeps a copy",
            stages=(3,),
            users=(16, 1),
        ),
    ] = True
    override_module_apply: Annotated[
        Flag,
        knob(
            "Gather parameters inside `Module.apply`.",
            status=Status.NO_MEANING,
            reason="every operation on a parameter finds its values, inside Module.apply and outside",
            stages=(3,),
        ),
    ] = True
    pipeline_loading_checkpoint: Annotated[
        Flag,
        knob(
            "Load a checkpoint rank by rank.",
            status=Status.NO_MEANING,
            reason="every rank reads only its own part",
            stages=(3,),
        ),
    ] = False
    log_trace_cache_warnings: Annotated[
        Flag,
        knob(
            "Warn when the order of gathering changes.",
            status=Status.NO_MEANING,
            reason="a changed order costs a gather on demand, and ranks that gather in different orders are refused",
            stages=(3,),
        ),
    ] = False
    enable_sanity_checks: Annotated[
        Flag,
        knob(
            "Refuse on every rank, at the end of the context, what any rank writes inside a GatheredParameters without "
            "modifier_rank. Costs an all-reduce of one byte a parameter that was open. Otherwise such writes are taken "
            "over, and the next step refuses them where not all ranks have written to the same parameters.",
        ),
    ] = False
    save_muon_momentum_buffer_in_memory: Annotated[
        Flag,
        knob(
            "Keep Muon's momentum in GPU memory beside offloaded states.",
            status=Status.PLANNED,
            reason="offload Muon's state",
            harmless=True,
        ),
    ] = False
    leaf_module: Annotated[LeafModule, knob("Modules gathered as one.")] = unset(LeafModule)
    offload_optimizer: Annotated[OffloadOptimizer, knob("Optimizer states outside the GPU.")] = unset(OffloadOptimizer)
    offload_param: Annotated[OffloadParam, knob("Parameters outside the GPU.")] = unset(OffloadParam)
    offload_placement: Annotated[
        OffloadPlacement, knob("What decides which optimizer states stay on the GPU, where that is left open.")
    ] = unset(OffloadPlacement)
    zenflow: Annotated[
        ZenFlow | None,
        knob("Selective updates.", status=Status.PLANNED, reason="update gradients selectively (ZenFlow)"),
    ] = None
