"""`"auto"` bucket sizes, once the model is known, by the formulas that trainers use."""

from __future__ import annotations

from dataclasses import replace

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
