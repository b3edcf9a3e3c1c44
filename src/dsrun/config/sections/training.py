"""Schema of the whole config: the top-level keys, and which section each object is."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from dsrun.config.knob import Auto, Section, Status, knob, unset
from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.config.sections.checkpoint import Checkpoint
from dsrun.config.sections.data import Autotuning, DataEfficiency
from dsrun.config.sections.memory import Aio
from dsrun.config.sections.monitors import Aim, Comet, CsvMonitor, Mlflow, TensorBoard, Trackio, Wandb
from dsrun.config.sections.observe import CommsLogger, FlopsProfiler, Timers
from dsrun.config.sections.optimizer import OptimizerSection
from dsrun.config.sections.parallel import Compile, ExpertParallel, HybridEngine, Pipeline, TensorParallel
from dsrun.config.sections.precision import Bf16, DataTypes, Fp8, Fp16, TorchAutocast
from dsrun.config.sections.scheduler import SchedulerSection
from dsrun.config.sections.zero import ZeroOptimization
from dsrun.config.values import Count, Divisor, Dtype, Flag, NonNegative, Positive, Whole, as_whole

_SP = "cut sequences over ranks"


def _steps_or_never(value: object) -> object:
    """Reads 0 and infinity, as some trainers set it, as never."""
    return None if value in (0, float("inf")) and not isinstance(value, bool) else as_whole(value)


REMOVED_SECTIONS: Mapping[str, str] = {
    "amp": "write `bf16` or `fp16`; Apex is gone",
    "compression_training": "compress after training with a tool made for it; the section is gone upstream",
    "curriculum_learning": "write `data_efficiency.data_sampling.curriculum_learning`",
    "eigenvalue": "drop it; it served quantised training, which is gone upstream",
    "elasticity": "drop it; a checkpoint loads on any number of ranks",
    "graph_harvesting": "drop it; compile the model with torch.compile",
    "nebula": "drop it; checkpoints are written by `save_checkpoint`",
    "progressive_layer_drop": "drop layers in the model itself; the section is gone upstream",
    "quantize_training": "drop it; the section is gone upstream",
    "sparse_attention": "use an attention of torch or the model; the section is gone upstream",
    "sparse_gradients": "drop it; embedding gradients are dense",
}


class Training(Section):
    """A training config."""

    removed: ClassVar = REMOVED_SECTIONS
    renamed: ClassVar = {"bfloat16": "bf16", "train_micro_batch_size": "train_micro_batch_size_per_gpu"}

    train_batch_size: Annotated[
        Positive | None,
        knob(
            "Samples per optimizer update, over all ranks.",
            unit="samples",
            effect="= micro batch x accumulation steps x data-parallel size",
            auto=Auto.SCRIPT,
            users=(225, 38),
        ),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        Positive | None,
        knob(
            "Samples per forward pass of one rank.",
            unit="samples",
            effect="activation memory grows with it",
            auto=Auto.SCRIPT,
            users=(323, 45),
        ),
    ] = None
    gradient_accumulation_steps: Annotated[
        Positive | None,
        knob(
            "Forward passes whose gradients are added up for one update.",
            unit="micro steps",
            effect="a larger batch in the same memory",
            auto=Auto.SCRIPT,
            users=(217, 42),
        ),
    ] = None
    managed_gradient_accumulation: Annotated[
        Flag,
        knob(
            "The engine counts micro steps; false: every `step` updates the parameters.",
        ),
    ] = True
    steps_per_print: Annotated[
        Positive | None,
        BeforeValidator(_steps_or_never),
        knob("Updates between two progress lines; none prints none.", unit="updates", users=(246, 33)),
    ] = None
    wall_clock_breakdown: Annotated[
        Flag,
        knob(
            "Print the seconds of each phase of a step with its progress line; no step waits for the device for it.",
            users=(226, 34),
        ),
    ] = False
    gradient_clipping: Annotated[
        NonNegative,
        knob(
            "Scale gradients down where their norm over all parameters exceeds this; 0 never does.",
            unit="L2 norm",
            auto=Auto.DEFAULT,
            differs="0, no clipping, before 0.19",
            users=(251, 37),
        ),
    ] = 1.0
    prescale_gradients: Annotated[
        Flag,
        knob(
            "Divide gradients before they are reduced, not after.",
            effect="sums of 16-bit gradients over many ranks cannot overflow, and lose small values",
            users=(73, 3),
        ),
    ] = False
    gradient_predivide_factor: Annotated[
        Divisor,
        knob(
            "Part of the division that comes before the reduction, where `prescale_gradients` is false.",
            users=(1, 1),
        ),
    ] = 1.0
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"],
        knob(
            "Average gradients over the ranks, or add them up; those of micro steps are averaged either way.",
            effect='"sum": gradients and their norm are as many times as large as there are ranks',
        ),
    ] = "mean"
    gradient_reduction: Annotated[
        Literal["auto", "micro_step", "update"],
        knob(
            "When ranks with the same parameters sum gradients up: after every micro step, or once an update; auto: "
            "once an update where there are several pipeline stages, else after every micro step.",
            effect='"update": as many times less traffic as there are micro steps, and 4 bytes a parameter more at '
            "stages 1 to 3; losses differ in their last bits",
        ),
    ] = "auto"
    communication_data_type: Annotated[
        Dtype | None,
        knob(
            "Format in which gradients travel and are added up over the ranks; none takes the model's.",
            effect="another one than the model's: two buffers of the largest unit more, and a copy",
        ),
    ] = None
    seq_parallel_communication_data_type: Annotated[
        Dtype,
        knob(
            "Format in which sequence-parallel gradients travel.",
            status=Status.PLANNED,
            reason=_SP,
            harmless=True,
            users=(1, 1),
        ),
    ] = "fp32"
    zero_allow_untested_optimizer: Annotated[
        Flag,
        knob(
            "Allow an optimizer of the script that is not known to update each element by itself.",
            users=(39, 13),
        ),
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        Flag,
        knob(
            "Refuse optimizers of the script with offload.",
            status=Status.NO_MEANING,
            reason="every elementwise torch optimizer works with offload",
            idle=(False,),
            users=(16, 7),
        ),
    ] = True
    dump_state: Annotated[Flag, knob("Print the engine's state once, on rank 0.", harmless=True)] = False
    memory_breakdown: Annotated[Flag, knob("Print memory by kind after every step, on rank 0.", harmless=True)] = False
    disable_allgather: Annotated[
        Flag,
        knob(
            "Leave out the gathering of updated parameters.",
            status=Status.NO_MEANING,
            reason="training without it would be wrong",
        ),
    ] = False
    dataloader_drop_last: Annotated[
        Flag,
        knob(
            "Leave out the last samples of an epoch where they fill no micro batch on every rank; else the first ones "
            "of the next epoch fill it up.",
            users=(4, 1),
        ),
    ] = False
    dataloader_num_workers: Annotated[
        Count,
        knob(
            "Processes of each rank that make batches of `training_data` ahead; 0 makes them in the rank.",
            unit="processes",
            effect="the same batches for any number; each holds a copy of what the dataset keeps in Python objects",
        ),
    ] = 0
    dataloader_seed: Annotated[
        Whole, knob("Seed of the order of `training_data`, and of what its samples draw at random.")
    ] = 1234
    vocabulary_size: Annotated[
        Positive | None,
        knob(
            "Size of the vocabulary, to warn where it is no multiple of 8.",
            unit="tokens",
            status=Status.NO_MEANING,
            reason="the model's own shapes say it",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        knob("Level of log lines.", status=Status.PLANNED, reason="set the log level by this key", harmless=True),
    ] = None
    use_data_before_expert_parallelism: Annotated[
        Flag, knob("Order of the axes of the mesh.", status=Status.PLANNED, reason="spread experts over ranks")
    ] = False
    disable_python_gc: Annotated[
        Flag,
        knob(
            "Collect Python's garbage between steps only.",
            status=Status.PLANNED,
            reason="move garbage collection",
            harmless=True,
        ),
    ] = False
    sequence_parallel_size: Annotated[
        Positive,
        knob("Ranks that share a sequence.", unit="ranks", status=Status.PLANNED, reason=_SP, users=(1, 1)),
    ] = 1
    data_parallel_size: Annotated[
        Positive | None,
        knob(
            "Ranks that see different samples, to build a mesh with `sequence_parallel_size`.",
            unit="ranks",
            status=Status.NO_MEANING,
            reason="it follows from the number of ranks and the other axes",
            users=(1, 1),
        ),
    ] = None

    optimizer: Annotated[OptimizerSection | None, knob("The optimizer; none where the script hands one over.")] = None
    scheduler: Annotated[SchedulerSection | None, knob("The learning-rate scheduler; none keeps the rate.")] = None
    fp16: Annotated[Fp16, knob("Mixed precision in fp16.")] = unset(Fp16)
    bf16: Annotated[Bf16, knob("Mixed precision in bf16.")] = unset(Bf16)
    torch_autocast: Annotated[TorchAutocast, knob("Autocast around forward.")] = unset(TorchAutocast)
    fp8: Annotated[Fp8, knob("Linear layers that multiply in fp8.")] = unset(Fp8)
    data_types: Annotated[DataTypes, knob("Number formats of single kinds of tensors.")] = unset(DataTypes)
    zero_optimization: Annotated[ZeroOptimization, knob("ZeRO.")] = unset(ZeroOptimization)
    activation_checkpointing: Annotated[ActivationCheckpointing, knob("Recomputation of activations.")] = unset(
        ActivationCheckpointing
    )
    aio: Annotated[Aio, knob("Reading and writing NVMe.")] = unset(Aio)
    tensor_parallel: Annotated[TensorParallel, knob("Layers cut over ranks.")] = unset(TensorParallel)
    pipeline: Annotated[Pipeline, knob("Pipeline stages.")] = unset(Pipeline)
    expert_parallel: Annotated[ExpertParallel, knob("Experts spread over ranks.")] = unset(ExpertParallel)
    hybrid_engine: Annotated[HybridEngine, knob("Generation inside training.")] = unset(HybridEngine)
    compile: Annotated[Compile, knob("Compilation of the sharded model.")] = unset(Compile)
    checkpoint: Annotated[Checkpoint, knob("Saving and loading.")] = unset(Checkpoint)
    datastates_ckpt: Annotated[
        dict[str, Any] | None,
        knob(
            "DataStates' checkpoint engine.",
            status=Status.NO_MEANING,
            reason="checkpoints are written by dsrun's own engine",
        ),
    ] = None
    tensorboard: Annotated[TensorBoard, knob("Scalars for TensorBoard.")] = unset(TensorBoard)
    csv_monitor: Annotated[CsvMonitor, knob("Scalars as CSV files.")] = unset(CsvMonitor)
    wandb: Annotated[Wandb, knob("Scalars for Weights & Biases.")] = unset(Wandb)
    comet: Annotated[Comet, knob("Scalars for Comet.")] = unset(Comet)
    mlflow: Annotated[Mlflow, knob("Scalars for MLflow.")] = unset(Mlflow)
    trackio: Annotated[Trackio, knob("Scalars for trackio.")] = unset(Trackio)
    aim: Annotated[Aim, knob("Scalars for Aim.")] = unset(Aim)
    comms_logger: Annotated[CommsLogger, knob("A record of every collective.")] = unset(CommsLogger)
    flops_profiler: Annotated[FlopsProfiler, knob("Counts the arithmetic of one step.")] = unset(FlopsProfiler)
    timers: Annotated[Timers, knob("Timers.")] = unset(Timers)
    autotuning: Annotated[Autotuning, knob("Search for the fastest batch and stage.")] = unset(Autotuning)
    data_efficiency: Annotated[DataEfficiency, knob("Curriculum and sampling.")] = unset(DataEfficiency)
    weight_quantization: Annotated[
        dict[str, Any] | None,
        knob(
            "Quantised weights for inference.",
            status=Status.NO_MEANING,
            reason="it serves inference, and this is a training runtime",
        ),
    ] = None

    @property
    def reduces_once_an_update(self) -> bool:
        """Whether gradients are reduced once an update, with `auto` of `gradient_reduction` resolved."""
        if self.gradient_reduction == "auto":
            return self.pipeline.count > 1
        return self.gradient_reduction == "update"

    @property
    def gathers_chunks(self) -> bool:
        """Whether parameters of pipeline stages are slices, gathered for all micro batches of a chunk together."""
        return self.zero_optimization.stage == 3 and self.pipeline.takes_turns

    @property
    def cutting_stage(self) -> int:
        """ZeRO stage by which state is cut up: 2 for 3 where the stages of a pipeline have their parameters whole.

        That is under all schedules but those of `gathers_chunks`, see docs/decisions/0069.
        """
        stage = self.zero_optimization.stage
        return 2 if stage == 3 and self.pipeline.count > 1 and not self.gathers_chunks else stage
