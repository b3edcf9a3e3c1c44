"""Schema of `optimizer`: types, and the model of each one's parameters."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from dsrun.config.knob import Choices, Section, knob
from dsrun.config.sections.optimizer_params import (
    AdadeltaParams,
    AdafactorParams,
    AdagradParams,
    Adam8bitParams,
    AdamaxParams,
    AdamMiniParams,
    AdamParams,
    AdamW8bitParams,
    LambParams,
    Lion8bitParams,
    LionParams,
    MuonParams,
    NAdamParams,
    OptimizerParams,
    RAdamParams,
    RmspropParams,
    SgdParams,
)

#: Types this version builds, with the model of their parameters; names of DeepSpeed's classes mean what they stand for.
_BUILT: Mapping[str, type[OptimizerParams]] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), AdamParams),
    "SGD": SgdParams,
    **dict.fromkeys(("Adagrad", "DeepSpeedCPUAdagrad"), AdagradParams),
    **dict.fromkeys(("Lamb", "FusedLamb"), LambParams),
    **dict.fromkeys(("Lion", "FusedLion", "DeepSpeedCPULion"), LionParams),
    **dict.fromkeys(("Muon", "MuonWithAuxAdam"), MuonParams),
    "Adafactor": AdafactorParams,
    "AdamMini": AdamMiniParams,
    "Adam8bit": Adam8bitParams,
    "AdamW8bit": AdamW8bitParams,
    "Lion8bit": Lion8bitParams,
    "RMSprop": RmspropParams,
    "Adadelta": AdadeltaParams,
    "Adamax": AdamaxParams,
    "NAdam": NAdamParams,
    "RAdam": RAdamParams,
}

#: Types the schema knows and a later version builds; those of torch without a model of their parameters.
_PLANNED: Mapping[str, type[Section] | None] = {
    **dict.fromkeys(("MuAdam", "MuAdamW"), AdamParams),
    "MuSGD": SgdParams,
    **dict.fromkeys(("ASGD", "Rprop"), None),
}

#: Types that are gone upstream, or can run nowhere here, with what to do instead.
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
    params: Annotated[
        AdamParams
        | SgdParams
        | AdagradParams
        | LambParams
        | LionParams
        | MuonParams
        | AdafactorParams
        | AdamMiniParams
        | Adam8bitParams
        | RmspropParams
        | AdadeltaParams
        | AdamaxParams,
        knob("Parameters of the optimizer.", choices=OPTIMIZERS, users=(202, 31)),
    ]
