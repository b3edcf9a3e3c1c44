"""The units that a model's trained parameters become, as its config says; `zero/units/find.py` knows no config."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from dsrun.config.config import Config

from ...layout.cuts import NO_CUTS, Cuts
from ...precision.configured import autocast_of
from ...precision.traffic import low_precision_gradients
from ...zero.units.find import UnitSpec, find_units


def trained_units(
    model: nn.Module,
    settings: Config,
    *,
    compute: torch.dtype,
    kept: Collection[int],
    cuts: Cuts = NO_CUTS,
    piece_of: Mapping[str, str] | None = None,
) -> list[UnitSpec]:
    """Returns the units of a model's trained parameters, as its engine cuts them.

    Args:
        model: the model, whose leaf modules are marked.
        settings: the config.
        compute: dtype that the model computes in.
        kept: ids of parameters that stay in fp32.
        cuts: parameters that an axis beside data has changed.
        piece_of: name of the piece that each parameter is in, by its name; None: the model is not cut.
    """
    return find_units(
        model,
        kept=kept,
        light=low_precision_gradients(model, settings.torch_autocast.lower_precision_safe_modules, compute=compute),
        comm_dtype=autocast_of(settings),
        cuts=cuts,
        piece_of=None if piece_of is None else piece_of.__getitem__,
    )
