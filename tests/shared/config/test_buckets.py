"""Bucket sizes that wait for the model."""

from __future__ import annotations

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.config.buckets import gather_budgets, resolve_buckets, tell_auto
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


def test_stage_3_gathers_by_the_keys_in_the_config_and_by_the_defaults_where_auto_is_still_open() -> None:
    assert gather_budgets(load({"zero_optimization": {"stage": 3}})) == GatherBudgets()
    keys = {
        "stage3_param_persistence_threshold": 10,
        "stage3_model_persistence_threshold": 20,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_live_parameters": 40,
    }
    given = gather_budgets(load({"zero_optimization": {"stage": 3, **keys}}))
    assert given == GatherBudgets(stay=10, stay_total=20, ahead=0, live=40)
    config = load({"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}})
    assert gather_budgets(config) == GatherBudgets()
    assert gather_budgets(resolve_buckets(config, 100)) == GatherBudgets(stay=1000, ahead=9000)


def test_what_became_of_auto_is_told() -> None:
    keys = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = load({"zero_optimization": {"stage": 3, **keys}})
    told = '"auto" is `stage3_prefetch_bucket_size` {}, `stage3_param_persistence_threshold` {}'
    assert tell_auto(config, resolve_buckets(config, 100)) == told.format("9,000", "1,000")
    assert tell_auto(config, config) == told.format("the default", "the default"), "nobody knows the model's width"
    assert tell_auto(load({"zero_optimization": {"stage": 3}}), config) is None
