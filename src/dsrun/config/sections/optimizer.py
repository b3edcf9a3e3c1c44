"""Schema of `optimizer`: types, and the model of each one's parameters."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import SerializeAsAny

from dsrun.config.knob import Choices, Section, knob
from dsrun.config.sections.optimizer_params import AdamParams, OptimizerParams, SgdParams
from dsrun.config.sections.optimizer_table import OPTIMIZER_ROWS

#: Types this version builds; names of DeepSpeed's classes mean what they stand for.
_BUILT: Mapping[str, type[OptimizerParams]] = {
    name: row.params for row in OPTIMIZER_ROWS if row.params is not None for name in row.names
}

#: Types the schema knows and a later version builds; those of torch without a model of their parameters.
_PLANNED: Mapping[str, type[Section] | None] = {
    **dict.fromkeys(("MuAdam", "MuAdamW"), AdamParams),
    "MuSGD": SgdParams,
    **{name: None for row in OPTIMIZER_ROWS if row.params is None for name in row.names},
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
        SerializeAsAny[OptimizerParams],
        knob("Parameters of the optimizer.", choices=OPTIMIZERS, users=(202, 31)),
    ]
