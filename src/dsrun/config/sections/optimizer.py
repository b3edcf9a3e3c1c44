"""Schema of `optimizer`: types, and the typed parameters of each."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from dsrun.config.knob import Auto, Choices, Section, Status, knob
from dsrun.config.sections.optimizer_planned import AdagradParams, LambParams, LionParams, MuonParams
from dsrun.config.values import Betas, Flag, NonNegative

_LR = "Learning rate; the start value where a scheduler is set."
_DECAY = "Weight decay."


class AdamParams(Section):
    """Parameters of Adam and AdamW."""

    renamed: ClassVar = {"learning_rate": "lr"}
    removed: ClassVar = {
        "max_grad_norm": "write `gradient_clipping` at the top level",
        "freeze_step": "1-bit optimizers are gone; drop it",
    }

    lr: Annotated[NonNegative, knob(_LR, users=(201, 31))] = 1e-3
    betas: Annotated[
        Betas, knob("Decay of the running means of gradient and squared gradient.", auto=Auto.DEFAULT, users=(158, 28))
    ] = (0.9, 0.999)
    eps: Annotated[NonNegative, knob("Added to the denominator.", auto=Auto.DEFAULT, users=(143, 26))] = 1e-8
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT, users=(146, 26))] = 0.0
    adam_w_mode: Annotated[
        Flag,
        knob(
            "Decay weights apart from the gradient (AdamW); false adds L2 to the gradient, for type `Adam` only.",
            users=(18, 5),
        ),
    ] = True
    torch_adam: Annotated[
        Flag,
        knob(
            "Use torch's Adam and not a fused kernel.",
            status=Status.NO_MEANING,
            why="the step is torch's arithmetic either way",
            idle=(True,),
            users=(24, 8),
        ),
    ] = False
    bias_correction: Annotated[
        Flag,
        knob(
            "Correct the running means for their start at zero.",
            status=Status.PLANNED,
            why="leave out the bias correction",
            users=(23, 3),
        ),
    ] = True
    amsgrad: Annotated[
        Flag,
        knob("Divide by the largest squared mean so far.", status=Status.PLANNED, why="keep AMSGrad's third state"),
    ] = False
    fp32_optimizer_states: Annotated[
        Flag,
        knob(
            "Keep the states of the CPU step in fp32.",
            status=Status.PLANNED,
            why="keep optimizer states in 16 bits",
        ),
    ] = True


class SgdParams(Section):
    """Parameters of SGD."""

    renamed: ClassVar = {"learning_rate": "lr"}
    removed: ClassVar = {"max_grad_norm": "write `gradient_clipping` at the top level"}

    lr: Annotated[NonNegative, knob(_LR)] = 1e-3
    momentum: Annotated[NonNegative, knob("Decay of the running mean of gradients; 0 keeps none.")] = 0.0
    dampening: Annotated[NonNegative, knob("Share of the gradient left out of the running mean.")] = 0.0
    weight_decay: Annotated[NonNegative, knob(_DECAY, auto=Auto.DEFAULT)] = 0.0
    nesterov: Annotated[Flag, knob("Look ahead along the momentum.")] = False


#: Types this version builds, with the model of their parameters.
_BUILT: Mapping[str, type[Section]] = {"Adam": AdamParams, "AdamW": AdamParams, "SGD": SgdParams}

#: Types the schema knows and a later version builds; those of torch without a model of their parameters.
_PLANNED: Mapping[str, type[Section] | None] = {
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    **dict.fromkeys(("MuAdam", "MuAdamW"), AdamParams),
    "MuSGD": SgdParams,
    **dict.fromkeys(("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor"), None),
}

#: Types that are gone upstream, with what to do instead.
_REMOVED: Mapping[str, str] = dict.fromkeys(
    ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), 'write "AdamW"; 1-bit optimizers are gone'
)


OPTIMIZERS = Choices(noun="optimizer", models=_BUILT, planned=_PLANNED, removed=_REMOVED)


class OptimizerSection(Section):
    """The optimizer, unless the script hands one to `initialize`."""

    dropped: ClassVar = {"legacy_fusion": "there is one implementation of each optimizer"}

    type: Annotated[
        str,
        knob(
            "Optimizer by name, upper or lower case. `Adam` means AdamW unless `params.adam_w_mode` is false.",
            users=(202, 31),
            expects="the name of an optimizer",
        ),
    ]
    params: Annotated[AdamParams | SgdParams, knob("Parameters of the optimizer.", choices=OPTIMIZERS, users=(202, 31))]
