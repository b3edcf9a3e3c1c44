"""Schema of `offload_optimizer` and `offload_param` in `zero_optimization`: what lives outside the GPU, and where."""

from typing import Annotated, Literal

from dsrun.config.knob import Section, Status, knob
from dsrun.config.values import Count, Flag, Fraction, FractionOrAuto, Names, Positive, PositiveOrAuto

Device = Literal["none", "cpu", "nvme"]
StateFormat = Literal["fp32", "bf16", "int8"]


class OffloadOptimizer(Section):
    """Optimizer states and the fp32 master weights outside the GPU."""

    switch = ("device", "none")

    device: Annotated[
        Device,
        knob(
            "Where optimizer states and master weights live.",
            effect="cpu: saves 16 bytes of GPU memory per parameter of the shard (12 with accumulation), costs PCIe "
            "traffic and a CPU step; any elementwise optimizer. nvme: likewise, and states take no host memory but "
            "`buffer_count` units; the disk is read and written once a step, 24 bytes per parameter of Adam",
            stages=(1, 2, 3),
            users=(93, 34),
        ),
    ] = "none"
    nvme_path: Annotated[
        Names | None,
        knob(
            "Folder on a local NVMe drive, for `device` nvme; a list of folders is striped over. Each rank has a file "
            "there without a name, which is gone with the rank.",
        ),
    ] = None
    pin_memory: Annotated[
        Flag,
        knob(
            "Page-lock the host buffers, so that copies overlap with compute.",
            differs="false before 0.19",
            users=(74, 30),
        ),
    ] = True
    buffer_count: Annotated[
        Positive,
        knob(
            "Host buffers through which states stream to and from NVMe.",
            effect="each as large as the masters and states of the largest unit; 3 keep reading, step and writing "
            "apart, more bridge units of different sizes",
            unit="buffers",
        ),
    ] = 4
    fast_init: Annotated[
        Flag,
        knob(
            "Write masters alone to NVMe when the engine is made, and states after the first step.",
            effect="saves two thirds of the bytes before the first step, and of those that it reads",
            differs="false",
        ),
    ] = True
    pipeline_read: Annotated[
        Flag,
        knob("Read the next unit's states from NVMe while one is updated.", differs="false"),
    ] = True
    pipeline_write: Annotated[
        Flag,
        knob("Write a unit's updated states to NVMe while the next is updated.", differs="false"),
    ] = True
    ratio: Annotated[
        FractionOrAuto,
        knob(
            "Share of the masters and optimizer states that leaves the GPU, in whole units; the first of the forward "
            'stay. "auto": the smallest for which what stays has room, see `offload_placement`.',
            effect="what stays is stepped on the GPU, and takes 16 bytes of its memory per parameter of the shard, "
            "crosses no bus and waits for no host memory",
            unit="fraction",
            stages=(1, 2, 3),
            users=(1, 1),
        ),
    ] = 1.0
    super_offload: Annotated[
        Flag,
        knob(
            "Step on the CPU during backward already, and again where the norm then asks for clipping.",
            effect="hides the step behind the backward too where clipping seldom acts, with the same bits; takes twice "
            "the host memory: masters, states and parameters lie there twice. `device` cpu",
            stages=(1, 2, 3),
        ),
    ] = False
    state_format: Annotated[
        StateFormat,
        knob(
            "Format that optimizer states lie in off the GPU; an update is computed in fp32 all the same.",
            effect="bytes per parameter of Adam in host memory or on the drive: fp32 8; bf16 4, rounded after each "
            "step; int8 2.03, codes with a scale for each 256 values as `Adam8bit` has them, of small tensors too. "
            "AdamW, Adam, Lion and SGD; `ratio` 1 and no `super_offload`",
            stages=(1, 2, 3),
        ),
    ] = "fp32"
    split_master: Annotated[
        Flag,
        knob(
            "Keep fp32 masters in two halves, of which the upper one is the bf16 parameter in host memory.",
            effect="2 bytes of host memory less per parameter of the shard, with the same bits; needs `device` cpu, "
            "`offload_param.device` cpu and bf16. A save joins them for a moment",
            stages=(3,),
        ),
    ] = False
    cpuadam_cores_perc: Annotated[
        Fraction,
        knob(
            "Share of the host's cores that the CPU step may use.",
            effect="of the cores that a rank may run on, the last ones; the others are left to the script",
            unit="fraction",
            stages=(1, 2, 3),
        ),
    ] = 0.8


class OffloadParam(Section):
    """Parameter shards outside the GPU."""

    switch = ("device", "none")

    device: Annotated[
        Device,
        knob(
            "Where parameter shards live between uses, frozen ones too. With the optimizer on the GPU, parameters in "
            "its own dtype (fp32 training) stay there.",
            effect="saves 2 bytes of GPU memory per parameter of the shard, costs as many over PCIe in every pass, "
            "and as many from the drive with nvme",
            stages=(3,),
            users=(53, 31),
        ),
    ] = "none"
    nvme_path: Annotated[
        Names | None,
        knob(
            "Folder on a local NVMe drive, for `device` nvme; a list of folders is striped over.",
            users=(2, 1),
        ),
    ] = None
    pin_memory: Annotated[
        Flag,
        knob(
            "Page-lock the host buffers, so that copies overlap with compute.",
            differs="false before 0.19",
            users=(43, 27),
        ),
    ] = True
    buffer_count: Annotated[
        Positive,
        knob(
            "Host buffers that stream parameters from NVMe, each as long as the longest slice of a unit. From host "
            "memory they stream straight into the slots of stage 3, as many as `stage3_prefetch_bucket_size` makes.",
            unit="buffers",
            users=(2, 1),
        ),
    ] = 5
    buffer_size: Annotated[
        PositiveOrAuto,
        knob(
            "Size of one such buffer.",
            unit="elements",
            status=Status.NO_MEANING,
            reason="a buffer is as long as the longest slice of a unit",
            idle=("auto",),
            users=(3, 1),
        ),
    ] = 100_000_000
    max_in_cpu: Annotated[
        Count,
        knob(
            "Parameters of a rank that stay in host memory when the rest is on NVMe: those of the first units.",
            unit="elements",
        ),
    ] = 1_000_000_000


class OffloadPlacement(Section):
    """Room for optimizer states on the GPU, where `offload_optimizer.ratio` is "auto"."""

    device_memory: Annotated[
        Count | None,
        knob(
            "Bytes of a GPU that model state may take: parameters, gradients, and masters and optimizer states that "
            "stay. null: what is free when the engine is made, less `activation_share`.",
            effect="ranks on the CPU have no such memory of their own: with null all states leave",
            unit="bytes",
            stages=(1, 2, 3),
        ),
    ] = None
    activation_share: Annotated[
        Fraction,
        knob(
            "Share of the free GPU memory that is left to activations and the allocator, where `device_memory` is "
            "null.",
            unit="fraction",
            stages=(1, 2, 3),
        ),
    ] = 0.5
    remeasure_after: Annotated[
        Positive | None,
        knob(
            "Look again after so many updates: say what a step took beside what was predicted, and bring units to the "
            "GPU for whose states memory was free all the time. null: the first placement stays.",
            effect="with the same bits; 9/10 of what was free at the peak is filled. With all parameters on the GPU, "
            "`device` cpu, fp32 states and no `super_offload`",
            unit="steps",
            stages=(1, 2, 3),
        ),
    ] = None
