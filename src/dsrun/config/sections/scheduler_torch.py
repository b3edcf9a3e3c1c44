"""Parameters of torch's own schedulers, with torch's names and defaults; those that JSON can say."""

from typing import Annotated, Literal

from dsrun.config.knob import Section, knob
from dsrun.config.values import Counts, Flag, Fraction, NonNegative, Positive, PositiveNumber, Share

_FACTOR = "What the rate is multiplied by"
_PERIOD = "Updates of"


class StepParams(Section):
    """Parameters of StepLR: a fall every so many updates."""

    step_size: Annotated[Positive, knob("Updates between two falls.", unit="updates")]
    gamma: Annotated[NonNegative, knob(f"{_FACTOR} in each fall.")] = 0.1


class MultiStepParams(Section):
    """Parameters of MultiStepLR: falls at given updates."""

    milestones: Annotated[Counts, knob("Updates after which the rate falls.", unit="updates")]
    gamma: Annotated[NonNegative, knob(f"{_FACTOR} in each fall.")] = 0.1


class ConstantParams(Section):
    """Parameters of ConstantLR: a share of the rate at first, then all of it."""

    factor: Annotated[Share, knob("Share of the rate at first.", unit="fraction")] = 1 / 3
    total_iters: Annotated[Positive, knob(f"{_PERIOD} that share.", unit="updates")] = 5


class LinearParams(Section):
    """Parameters of LinearLR: from one share of the rate to another in a line."""

    start_factor: Annotated[Share, knob("Share of the rate at first.", unit="fraction")] = 1 / 3
    end_factor: Annotated[Fraction, knob("Share of the rate at the end.", unit="fraction")] = 1.0
    total_iters: Annotated[Positive, knob(f"{_PERIOD} the line.", unit="updates")] = 5


class ExponentialParams(Section):
    """Parameters of ExponentialLR: a fall with every update."""

    gamma: Annotated[NonNegative, knob(f"{_FACTOR} after each update.")]


class PolynomialParams(Section):
    """Parameters of PolynomialLR: down to 0 along a power."""

    total_iters: Annotated[Positive, knob(f"{_PERIOD} the fall.", unit="updates")] = 5
    power: Annotated[NonNegative, knob("Of the polynomial.")] = 1.0


class CosineParams(Section):
    """Parameters of CosineAnnealingLR: down along half a cosine."""

    T_max: Annotated[Positive, knob(f"{_PERIOD} the fall.", unit="updates")]
    eta_min: Annotated[NonNegative, knob("Rate at the end.")] = 0.0


class CosineRestartsParams(Section):
    """Parameters of CosineAnnealingWarmRestarts: down along half a cosine, again and again."""

    T_0: Annotated[Positive, knob(f"{_PERIOD} the first fall.", unit="updates")]
    T_mult: Annotated[Positive, knob("How many times longer each fall is than the one before.")] = 1
    eta_min: Annotated[NonNegative, knob("Rate at the end of each.")] = 0.0


class OneCycleLRParams(Section):
    """Parameters of torch's OneCycleLR: one rise and one fall over the run, momentum the other way."""

    max_lr: Annotated[PositiveNumber, knob("Rate at the peak.")]
    total_steps: Annotated[Positive, knob(f"{_PERIOD} the whole run.", unit="updates")]
    pct_start: Annotated[Fraction, knob("Share of the run that rises.", unit="fraction")] = 0.3
    anneal_strategy: Annotated[Literal["cos", "linear"], knob("Shape of rise and fall.")] = "cos"
    cycle_momentum: Annotated[Flag, knob("Move momentum against the rate.")] = True
    base_momentum: Annotated[Fraction, knob("Momentum at the peak.")] = 0.85
    max_momentum: Annotated[Fraction, knob("Momentum at both ends.")] = 0.95
    div_factor: Annotated[PositiveNumber, knob("Peak over the first rate.")] = 25.0
    final_div_factor: Annotated[PositiveNumber, knob("First over the last rate.")] = 1e4
    three_phase: Annotated[Flag, knob("Fall to the first rate before falling to the last.")] = False
