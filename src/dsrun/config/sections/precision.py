"""Schema of the number formats: `fp16`, `bf16`, `data_types`, `torch_autocast`, `fp8`."""

from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Auto, Section, Status, knob
from dsrun.config.values import Count, Dtype, Flag, Names, NonNegative, Positive, Whole

_SCALE_FREE = "bf16 has the range of fp32 and needs no loss scale"


class Fp16(Section):
    """Mixed precision in fp16, with a loss scale."""

    switch = ("enabled", False)
    dropped: ClassVar = {
        "fp16": "it never had an effect; `fp16.enabled` is the switch",
        "type": "it never had an effect; `fp16.enabled` is the switch",
        "opt_level": "that is Apex; mixed precision here has one level",
        "fp16_scale_tolerance": "no version of today reads it",
    }

    enabled: Annotated[
        Flag,
        knob(
            "Train in fp16 with fp32 master weights and a loss scale.",
            effect="halves activations and weights; needs the loss scale against underflow",
            auto=Auto.OTHER_PRECISION,
            users=(268, 41),
        ),
    ] = False
    auto_cast: Annotated[Flag, knob("Cast floating-point inputs of the model to fp16.", users=(45, 11))] = False
    loss_scale: Annotated[NonNegative, knob("Fixed loss scale; 0 for a dynamic one.", users=(190, 34))] = 0.0
    initial_scale_power: Annotated[
        Count, knob("The dynamic scale starts at 2 to this power.", unit="exponent of 2", users=(180, 36))
    ] = 16
    loss_scale_window: Annotated[
        Positive, knob("Clean steps after which the scale doubles.", unit="steps", users=(184, 34))
    ] = 1000
    hysteresis: Annotated[Whole, knob("Overflows before the scale is halved.", unit="steps", users=(182, 34))] = 2
    consecutive_hysteresis: Annotated[Flag, knob("Refill the hysteresis after every clean step.", users=(14, 3))] = (
        False
    )
    min_loss_scale: Annotated[NonNegative, knob("The dynamic scale never falls below this.", users=(182, 35))] = 1.0
    fp16_master_weights_and_grads: Annotated[
        Flag,
        knob(
            "Keep master weights and sums of gradients in fp16 too; optimizer states stay fp32.",
            effect="no masters, and half the bytes of sums; updates below 1/2048 of a weight are lost",
        ),
    ] = False


class Bf16(Section):
    """Mixed precision in bf16, with fp32 master weights."""

    switch = ("enabled", False)
    dropped: ClassVar = {
        **dict.fromkeys(
            (
                "loss_scale",
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "consecutive_hysteresis",
                "min_loss_scale",
            ),
            _SCALE_FREE,
        ),
        "auto_cast": "it is a key of `fp16`; cast inputs with `.to(torch.bfloat16)`, or enable `torch_autocast`",
    }

    enabled: Annotated[
        Flag,
        knob(
            "Train in bf16 with fp32 master weights.",
            effect="halves activations and weights; no loss scale needed",
            auto=Auto.OTHER_PRECISION,
            users=(188, 37),
        ),
    ] = False
    immediate_grad_update: Annotated[
        Flag,
        knob(
            "Add to the fp32 gradient as soon as a bf16 one is ready.",
            status=Status.PLANNED,
            reason="choose when gradients are added up",
            harmless=True,
        ),
    ] = False
    check_grad_overflow: Annotated[
        Flag,
        knob(
            "Skip a step whose gradients hold an infinity or NaN.",
            differs="false before 0.19",
        ),
    ] = True
    bf16_master_weights_and_grads: Annotated[
        Flag,
        knob(
            "Keep master weights and sums of gradients in bf16 too.",
            effect="no masters, and half the bytes of sums; updates below 1/256 of a weight are lost",
            users=(1, 1),
        ),
    ] = False
    bf16_optimizer_states: Annotated[
        Flag,
        knob(
            "Keep optimizer states in bf16; with `bf16_master_weights_and_grads` only.",
            effect="half the bytes of states",
        ),
    ] = False


class DataTypes(Section):
    """Number formats of single kinds of tensors."""

    grad_accum_dtype: Annotated[
        Dtype | None,
        knob(
            "Format in which gradients of several micro batches are added up; fp32 if not set.",
            effect="a 16-bit one halves the bytes of sums, and small gradients of many micro batches are lost in it",
            differs="the model's own format",
            users=(8, 2),
        ),
    ] = None
    param_dtype: Annotated[
        Dtype | None,
        knob("Format of parameters: the one that `fp16` or `bf16` says, or fp32, which casts those built in float64."),
    ] = None
    buffer_dtype: Annotated[
        Dtype | None,
        knob("Format of module buffers; as parameters if not set.", differs="the format they are built in"),
    ] = None
    keep_in_fp32_modules: Annotated[
        Literal["auto"] | Names,
        knob(
            "Patterns of names of modules, parameters and buffers that stay in fp32 where the model has 16 bits; `*` "
            'stands for any characters. "auto": buffers that lists in the classes of transformers name.',
            effect="4 bytes in place of 2 for parameters and gradients, and at stage 3 whole on every rank",
            auto=Auto.DEFAULT,
            differs="the same, and lists keep buffers alone",
        ),
    ] = "auto"


class TorchAutocast(Section):
    """`torch.autocast` around forward, in place of casting the model."""

    switch = ("enabled", False)

    enabled: Annotated[
        Flag,
        knob(
            "Run forward under `torch.autocast`.",
            effect="16-bit activations of matrix products; parameters and gradients stay in fp32, or as `bf16` says",
            users=(2, 1),
        ),
    ] = False
    dtype: Annotated[
        Literal["bfloat16", "float16", "torch.bfloat16", "torch.float16"] | None,
        knob("Format that autocast uses; bfloat16 if not set. float16 brings a dynamic loss scale.", users=(1, 1)),
    ] = None
    lower_precision_safe_modules: Annotated[
        Names,
        knob(
            'Class names of modules whose gradients are exchanged in that format, e.g. "Linear"; other ones in fp32.',
            effect="half the traffic of their gradients, added up over the ranks in 16 bits",
            differs="Linear and convolutions",
        ),
    ] = ()


class Fp8(Section):
    """Linear layers that multiply in fp8, by torchao; with `bf16`, or `torch_autocast` in bfloat16."""

    switch = ("enabled", False)

    enabled: Annotated[
        Flag,
        knob(
            "Multiply in fp8 in linear layers whose widths are multiples of 16; wants torchao and a GPU of compute "
            "capability 8.9 or more.",
            effect="up to twice as fast products of large matrices; weights and gradients keep their formats and bytes",
        ),
    ] = False
    recipe: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"],
        knob(
            "What shares a scale: a tensor, or each row; the last keeps the product for a weight's gradient in bf16.",
            effect="rows are more exact, a tensor is faster",
        ),
    ] = "tensorwise"
    exclude: Annotated[
        Names,
        knob("Patterns of names of linear layers that stay as they are; `*` stands for any characters."),
    ] = ()
    emulate: Annotated[
        Flag,
        knob(
            "Round values to fp8 and multiply them in 16 bits, on any device: to try what it does to a loss.",
            effect="slower than without fp8",
        ),
    ] = False
