"""Bucket sizes that wait for the model."""

from __future__ import annotations

from dsrun.config.buckets import resolve_buckets
from dsrun.config.load import load


def test_auto_buckets_follow_the_hidden_size_and_numbers_stay() -> None:
    config = load(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": 7,
            }
        }
    )
    zero = resolve_buckets(config, 4096).zero_optimization
    assert zero.reduce_bucket_size == 4096 * 4096
    assert zero.stage3_prefetch_bucket_size == 15_099_494
    assert zero.stage3_param_persistence_threshold == 7
    assert config.zero_optimization.reduce_bucket_size == "auto"
    source = resolve_buckets(config, 4096).provenance["zero_optimization.reduce_bucket_size"]
    assert str(source) == "auto, from hidden size 4096"


def test_a_config_without_auto_stays_the_same() -> None:
    config = load({})
    assert resolve_buckets(config, 64) is config
