"""Schema of `data_efficiency` and `autotuning`: which samples are seen, and the search for a fast config."""

from typing import Annotated, Any, Literal

from dsrun.config.knob import Section, Status, knob, unset
from dsrun.config.values import Count, Flag, Positive, Whole

_CURRICULUM = "sample by difficulty"
_RANDOM_LTD = "drop tokens at random"


class RandomLtd(Section):
    """Layers that see a random part of the tokens."""

    default_status = Status.PLANNED
    default_reason = _RANDOM_LTD
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Drop tokens at random in the middle layers.", users=(11, 2))] = False
    total_layer_num: Annotated[Positive | None, knob("Layers of the model.", unit="layers")] = None
    random_ltd_layer_num: Annotated[Count | None, knob("Layers that drop tokens.", unit="layers")] = None
    random_ltd_layer_id: Annotated[list[int] | None, knob("Which layers drop tokens.")] = None
    model_mask_name: Annotated[str | None, knob("Name of the mask argument.")] = None
    model_type: Annotated[Literal["decoder", "encoder"] | None, knob("Kind of model.")] = None
    hidden_state_order: Annotated[str | None, knob("Order of the dims of hidden states.")] = None
    micro_batch_size: Annotated[Positive | None, knob("Samples per forward pass.", unit="samples")] = None
    global_batch_size: Annotated[Positive | None, knob("Samples per update.", unit="samples")] = None
    layer_token_lr_schedule: Annotated[dict[str, Any] | None, knob("Learning rate by tokens seen.")] = None
    random_ltd_schedule: Annotated[dict[str, Any] | None, knob("How the number of kept tokens grows.")] = None


class DataRouting(Section):
    """Which layers see which tokens."""

    default_status = Status.PLANNED
    default_reason = _RANDOM_LTD
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Route tokens.", users=(11, 2))] = False
    random_ltd: Annotated[RandomLtd, knob("Drop tokens at random.")] = unset(RandomLtd)


class CurriculumLearning(Section):
    """Easy samples first."""

    default_status = Status.PLANNED
    default_reason = _CURRICULUM
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Sample by difficulty.", users=(6, 2))] = False
    data_cluster_path: Annotated[str | None, knob("Folder of the sample index.")] = None
    curriculum_metrics: Annotated[dict[str, Any] | None, knob("Difficulty measures, each with its schedule.")] = None


class DynamicBatching(Section):
    """Batches of about equal numbers of tokens."""

    default_status = Status.PLANNED
    default_reason = "size batches by tokens"
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Size batches by tokens.")] = False
    metrics_path: Annotated[str | None, knob("File with the length of every sample.")] = None
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], knob("Scale the rate with the batch.")] = "linear"
    min_batch_size: Annotated[Positive, knob("Smallest batch.", unit="samples")] = 1
    max_batch_size: Annotated[Positive | None, knob("Largest batch.", unit="samples")] = None
    sequence_picking_order: Annotated[Literal["dataloader", "random", "seqlen"], knob("Order of samples.")] = (
        "dataloader"
    )
    max_tokens: Annotated[Positive | None, knob("Tokens per batch.", unit="tokens")] = None
    verbose: Annotated[Flag, knob("Print every batch.")] = False


class DataSampling(Section):
    """Which samples come when."""

    default_status = Status.PLANNED
    default_reason = _CURRICULUM
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Choose the order of samples.", users=(6, 2))] = False
    num_epochs: Annotated[Positive, knob("Epochs to plan for.", unit="epochs")] = 1000
    num_workers: Annotated[Count, knob("Loader processes.", unit="processes")] = 0
    pin_memory: Annotated[Flag, knob("Page-lock samples.")] = False
    curriculum_learning: Annotated[CurriculumLearning, knob("Easy samples first.")] = unset(CurriculumLearning)
    dynamic_batching: Annotated[DynamicBatching, knob("Batches of equal tokens.")] = unset(DynamicBatching)


class DataEfficiency(Section):
    """Curriculum, sampling and token dropping."""

    default_status = Status.PLANNED
    default_reason = "choose samples by a curriculum"
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Switch the section on.", users=(11, 2))] = False
    seed: Annotated[Whole, knob("Seed of the sampling.")] = 1234
    data_routing: Annotated[DataRouting, knob("Which layers see which tokens.")] = unset(DataRouting)
    data_sampling: Annotated[DataSampling, knob("Which samples come when.")] = unset(DataSampling)


class Autotuning(Section):
    """Search for the fastest batch and stage by short runs."""

    default_status = Status.PLANNED
    default_reason = "search for a fast config"
    switch = ("enabled", False)

    enabled: Annotated[Flag, knob("Search before training.", users=(8, 2))] = False
    fast: Annotated[Flag, knob("Search batch sizes only.")] = True
    results_dir: Annotated[str | None, knob("Folder of results.")] = None
    exps_dir: Annotated[str | None, knob("Folder of experiments.")] = None
    overwrite: Annotated[Flag, knob("Replace earlier results.")] = True
    metric: Annotated[Literal["throughput", "latency", "flops"], knob("What to make best.")] = "throughput"
    metric_path: Annotated[str | None, knob("File with the metric.")] = None
    start_profile_step: Annotated[Count, knob("First step that counts.", unit="steps")] = 3
    end_profile_step: Annotated[Count, knob("Last step that counts.", unit="steps")] = 5
    max_train_batch_size: Annotated[Positive | None, knob("Largest batch to try.", unit="samples")] = None
    min_train_batch_size: Annotated[Positive, knob("Smallest batch to try.", unit="samples")] = 1
    max_train_micro_batch_size_per_gpu: Annotated[Positive, knob("Largest micro batch to try.", unit="samples")] = 1024
    min_train_micro_batch_size_per_gpu: Annotated[Positive, knob("Smallest micro batch to try.", unit="samples")] = 1
    num_tuning_micro_batch_sizes: Annotated[Positive, knob("Micro batches to try.", unit="sizes")] = 3
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], knob("How to search.")] = "gridsearch"
    tuner_early_stopping: Annotated[Count, knob("Stop after this many without gain.", unit="trials")] = 5
    tuner_num_trials: Annotated[Count, knob("Most trials.", unit="trials")] = 50
    mp_size: Annotated[Positive, knob("Ranks that share the model.", unit="ranks")] = 1
    arg_mappings: Annotated[dict[str, Any] | None, knob("Script arguments for config keys.")] = None
    model_info: Annotated[dict[str, Any] | None, knob("Size of the model.")] = None
    model_info_path: Annotated[str | None, knob("File with the size of the model.")] = None
