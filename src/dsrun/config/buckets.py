"""Bucket sizes: `"auto"` once the model is known, by the formulas that trainers use, and what they mean for stage 3."""

from __future__ import annotations

from dataclasses import replace

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.config.config import Config
from dsrun.config.provenance import Kind, Provenance, Source


def bucket_sizes(hidden_size: int) -> dict[str, int]:
    """Returns the size of each bucket that may be `"auto"`, in elements.

    Args:
        hidden_size: width of the model's residual stream.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def gather_budgets(config: Config) -> GatherBudgets:
    """Returns what a config allows stage 3 to keep gathered.

    A size that is still `"auto"`, for nobody knows the model's hidden size, means the default.

    Args:
        config: a checked config.
    """
    zero = config.zero_optimization
    defaults = type(zero).model_construct()

    def size(name: str) -> int | None:
        value = getattr(zero, name)
        return getattr(defaults, name) if value == "auto" else value

    return GatherBudgets(
        stay=size("stage3_param_persistence_threshold") or 0,
        stay_total=size("stage3_model_persistence_threshold") or 0,
        ahead=size("stage3_prefetch_bucket_size"),
        live=size("stage3_max_live_parameters"),
    )


def tell_auto(config: Config, resolved: Config) -> str | None:
    """Returns what became of the sizes of stage 3 that were `"auto"`, for people; None where none was.

    Args:
        config: a checked config.
        resolved: the same, for the model.
    """
    if config.cutting_stage != 3:
        return None
    names = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    asked = [name for name in names if getattr(config.zero_optimization, name) == "auto"]
    values = [(name, getattr(resolved.zero_optimization, name)) for name in asked]
    told = [f"`{name}` {'the default' if value == 'auto' else format(value, ',')}" for name, value in values]
    return f'"auto" is {", ".join(told)}' if told else None


def resolve_buckets(config: Config, hidden_size: int) -> Config:
    """Returns the config with a number in place of every `"auto"` bucket size.

    Args:
        config: a checked config.
        hidden_size: width of the model's residual stream.
    """
    zero = config.zero_optimization
    sizes = {name: size for name, size in bucket_sizes(hidden_size).items() if getattr(zero, name) == "auto"}
    if not sizes:
        return config
    sources = dict(config.provenance)
    for name in sizes:
        path = f"zero_optimization.{name}"
        sources[path] = Source(Kind.AUTO, sources[path].position, f"from hidden size {hidden_size}")
    resolved = config.model_copy(update={"zero_optimization": zero.model_copy(update=sizes)})
    return resolved.with_facts(replace(config.facts, provenance=Provenance(sources)))
