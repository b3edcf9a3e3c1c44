"""Parameters of each optimizer, typed, with the defaults of where it comes from."""

from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Auto, Section, Status, knob
from dsrun.config.values import (
    BelowOne,
    Betas,
    Count,
    Flag,
    NonNegative,
    NonPositive,
    Positive,
    PositiveNumber,
    TwoNonNegative,
)

_LR = "Learning rate; the start value where a scheduler is set."
_DECAY = "Weight decay, apart from the gradient."
_L2 = "Weight decay, added to the gradient."
_BETAS = "Decay of the running means of gradient and squared gradient."
_EPS = "Added to the denominator."
_8BIT = "Tensors of fewer elements keep fp32 states."


class OptimizerParams(Section):
    """What the parameters of all optimizers have in common."""

    renamed: ClassVar = {"learning_rate": "lr"}
    removed: ClassVar = {"max_grad_norm": "write `gradient_clipping` at the top level"}

    lr: Annotated[NonNegative, knob(_LR, users=(201, 31))] = 1e-3


class AdamParams(OptimizerParams):
    """Parameters of Adam and AdamW."""

    removed: ClassVar = {**OptimizerParams.removed, "freeze_step": "1-bit optimizers are gone; drop it"}

    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT, users=(158, 28))] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT, users=(143, 26))] = 1e-8
    weight_decay: Annotated[NonNegative, knob("Weight decay.", auto=Auto.DEFAULT, users=(146, 26))] = 0.0
    adam_w_mode: Annotated[
        Flag,
        knob(
            "Decay weights apart from the gradient (AdamW); false adds L2 to the gradient, but for type `AdamW`.",
            users=(18, 5),
        ),
    ] = True
    torch_adam: Annotated[
        Flag,
        knob(
            "Use torch's Adam and not a fused kernel.",
            status=Status.NO_MEANING,
            reason="the step is torch's arithmetic either way",
            idle=(True,),
            users=(24, 8),
        ),
    ] = False
    bias_correction: Annotated[
        Flag,
        knob(
            "Correct the running means for their start at zero; false is not for `amsgrad`.",
            users=(23, 3),
        ),
    ] = True
    amsgrad: Annotated[Flag, knob("Divide by the largest squared mean so far, a third state.")] = False
    fp32_optimizer_states: Annotated[
        Flag,
        knob(
            "Keep the states of the CPU step in fp32.",
            status=Status.PLANNED,
            reason="keep optimizer states in 16 bits",
        ),
    ] = True


class SgdParams(OptimizerParams):
    """Parameters of SGD."""

    momentum: Annotated[NonNegative, knob("Decay of the running mean of gradients; 0 keeps none.")] = 0.0
    dampening: Annotated[NonNegative, knob("Share of the gradient left out of the running mean.")] = 0.0
    weight_decay: Annotated[NonNegative, knob(_L2, auto=Auto.DEFAULT)] = 0.0
    nesterov: Annotated[Flag, knob("Look ahead along the momentum.")] = False


class AdagradParams(OptimizerParams):
    """Parameters of Adagrad."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-2
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-10
    weight_decay: Annotated[NonNegative, knob(_L2, auto=Auto.DEFAULT)] = 0.0


class LambParams(OptimizerParams):
    """Parameters of Lamb: Adam with a step scaled per tensor."""

    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    bias_correction: Annotated[Flag, knob("Correct the running means for their start at zero.")] = True
    amsgrad: Annotated[
        Flag,
        knob("Divide by the largest squared mean so far.", status=Status.PLANNED, reason="keep AMSGrad's third state"),
    ] = False
    max_coeff: Annotated[NonNegative, knob("Largest scale of a tensor's step.")] = 10.0
    min_coeff: Annotated[NonNegative, knob("Smallest scale of a tensor's step.")] = 0.01
    eps_inside_sqrt: Annotated[Flag, knob("Add `eps` under the root.")] = False


class LionParams(OptimizerParams):
    """Parameters of Lion: the sign of a running mean, one state in place of two."""

    betas: Annotated[
        Betas, knob("Weights of the running mean in the step, and in the next mean.", auto=Auto.DEFAULT)
    ] = (0.9, 0.999)
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0


class MuonParams(OptimizerParams):
    """Parameters of Muon: orthogonalised momentum for matrices, AdamW for the rest."""

    momentum: Annotated[BelowOne, knob("Decay of the running mean of matrices.")] = 0.95
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    muon_lr: Annotated[
        NonNegative | None, knob("Rate of matrices while `lr` has its first value; none takes `lr`.")
    ] = None
    adam_lr: Annotated[
        NonNegative | None, knob("Rate of the rest while `lr` has its first value; none takes `lr`.")
    ] = None
    betas: Annotated[Betas, knob("Decay of AdamW's running means.", auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob("Added to AdamW's denominator.", auto=Auto.DEFAULT)] = 1e-8
    ns_method: Annotated[
        Literal["gram", "standard"],
        knob("How matrices are orthogonalised: on themselves in bf16, or on their Gram matrices in fp32."),
    ] = "standard"
    per_head_muon: Annotated[
        Flag,
        knob(
            "Treat every attention head as its own matrix.",
            status=Status.PLANNED,
            reason="cut matrices into heads",
        ),
    ] = False


class AdafactorParams(OptimizerParams):
    """Parameters of Adafactor: means of rows and columns in place of a second moment, and no first."""

    lr: Annotated[NonNegative, knob("Bound on the rate, which falls with the root of the updates.")] = 1e-2
    beta2_decay: Annotated[NonPositive, knob("The new squared gradient has the weight: updates to this power.")] = -0.8
    eps: Annotated[TwoNonNegative, knob("Bounds below: on the root, and on the scale of a tensor.")] = (2.0**-23, 1e-3)
    d: Annotated[PositiveNumber, knob("Largest root mean square of a step before scaling.")] = 1.0
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0


class AdamMiniParams(OptimizerParams):
    """Parameters of AdamMini: one second moment a row or head."""

    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    num_heads: Annotated[
        Positive | None, knob("Query heads of a layer; none cuts queries and keys into rows.", unit="heads")
    ] = None
    num_kv_heads: Annotated[Positive | None, knob("Key heads of a layer; none takes `num_heads`.", unit="heads")] = None


class Adam8bitParams(OptimizerParams):
    """Parameters of Adam8bit: AdamW with states of 8 bits in blocks of 256."""

    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    min_8bit_size: Annotated[Count, knob(_8BIT, unit="elements")] = 4096


class AdamW8bitParams(Adam8bitParams):
    """Parameters of AdamW8bit: Adam8bit with the weight decay that bitsandbytes gives it."""

    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 1e-2


class Lion8bitParams(LionParams):
    """Parameters of Lion8bit: Lion with a state of 8 bits in blocks of 256."""

    min_8bit_size: Annotated[Count, knob(_8BIT, unit="elements")] = 4096


class RmspropParams(OptimizerParams):
    """Parameters of torch's RMSprop."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-2
    alpha: Annotated[BelowOne, knob("Decay of the running mean of the squared gradient.")] = 0.99
    eps: Annotated[NonNegative, knob(_EPS)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_L2, auto=Auto.DEFAULT)] = 0.0
    momentum: Annotated[NonNegative, knob("Decay of the running mean of steps; 0 keeps none.")] = 0.0
    centered: Annotated[Flag, knob("Subtract the squared mean of gradients, one state more.")] = False


class AdadeltaParams(OptimizerParams):
    """Parameters of torch's Adadelta."""

    lr: Annotated[NonNegative, knob(_LR)] = 1.0
    rho: Annotated[BelowOne, knob("Decay of the running means.")] = 0.9
    eps: Annotated[NonNegative, knob(_EPS)] = 1e-6
    weight_decay: Annotated[NonNegative, knob(_L2, auto=Auto.DEFAULT)] = 0.0


class AdamaxParams(OptimizerParams):
    """Parameters of torch's Adamax."""

    lr: Annotated[NonNegative, knob(_LR)] = 2e-3
    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_L2, auto=Auto.DEFAULT)] = 0.0


class NAdamParams(AdamaxParams):
    """Parameters of torch's NAdam."""

    momentum_decay: Annotated[NonNegative, knob("How fast the momentum grows to its last value.")] = 4e-3
    decoupled_weight_decay: Annotated[Flag, knob("Decay weights apart from the gradient.")] = False


class RAdamParams(AdamaxParams):
    """Parameters of torch's RAdam."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-3
    decoupled_weight_decay: Annotated[Flag, knob("Decay weights apart from the gradient.")] = False
