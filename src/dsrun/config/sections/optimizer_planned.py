"""Parameters of optimizers that are in the schema and not built yet; checked, then refused by name."""

from typing import Annotated, ClassVar, Literal

from dsrun.config.knob import Auto, Section, Status, knob
from dsrun.config.values import BelowOne, Betas, Flag, NonNegative

_LR = "Learning rate; the start value where a scheduler is set."
_DECAY = "Weight decay."
_BETAS = "Decay of the running means."
_EPS = "Added to the denominator."


class _Planned(Section):
    """What these have in common: no type of them is built."""

    default_status = Status.PLANNED
    default_why = "build that optimizer"
    renamed: ClassVar = {"learning_rate": "lr"}
    removed: ClassVar = {"max_grad_norm": "write `gradient_clipping` at the top level"}


class AdagradParams(_Planned):
    """Parameters of Adagrad."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-2
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-10
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0


class LambParams(_Planned):
    """Parameters of Lamb: Adam with a step scaled per tensor."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-3
    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    bias_correction: Annotated[Flag, knob("Correct the running means for their start at zero.")] = True
    amsgrad: Annotated[Flag, knob("Divide by the largest squared mean so far.")] = False
    max_coeff: Annotated[NonNegative, knob("Largest scale of a tensor's step.")] = 10.0
    min_coeff: Annotated[NonNegative, knob("Smallest scale of a tensor's step.")] = 0.01
    eps_inside_sqrt: Annotated[Flag, knob("Add `eps` under the root.")] = False


class LionParams(_Planned):
    """Parameters of Lion: the sign of a running mean, one state in place of two."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-3
    betas: Annotated[Betas, knob(_BETAS, auto=Auto.DEFAULT)] = (0.9, 0.999)
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0


class MuonParams(_Planned):
    """Parameters of Muon: orthogonalised momentum for matrices, Adam for the rest."""

    lr: Annotated[NonNegative, knob(_LR)] = 1e-3
    momentum: Annotated[BelowOne, knob("Decay of the running mean of matrices.")] = 0.95
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    muon_lr: Annotated[NonNegative | None, knob("Rate of matrices; none takes `lr`.")] = None
    adam_lr: Annotated[NonNegative | None, knob("Rate of the rest; none takes `lr`.")] = None
    betas: Annotated[Betas, knob("Decay of Adam's running means.", auto=Auto.DEFAULT)] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob(_EPS, auto=Auto.DEFAULT)] = 1e-8
    ns_method: Annotated[Literal["gram", "standard"], knob("How matrices are orthogonalised.")] = "standard"
    per_head_muon: Annotated[Flag, knob("Treat every attention head as its own matrix.")] = False
