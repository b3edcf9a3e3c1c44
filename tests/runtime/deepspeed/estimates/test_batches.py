"""The batch that most numbers of GPUs fit is DeepSpeed's; the two cases where it is not are errors or smaller batches.

Expected values were recorded from DeepSpeed 0.18.3, the last line of versions that computed them.
"""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.errors import InputError
from dsrun.runtime.deepspeed.estimates.batches import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

VERSION = "0.19.8+dsrun.0.2.0"
DEFAULTS = {"micro_batch_sizes": [2, 4, 6], "max_train_batch_size": 2000}
LARGE = {
    "micro_batch_sizes": [8, 12, 16, 17],
    "max_train_batch_size": 10000,
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}


def config(*, version: float = 0.2, **section: Any) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, "version": version, **section}}


@pytest.mark.parametrize(
    ("section", "ranks", "batch", "count", "total", "micro"),
    # Of the numbers of ranks that fit, how many there are and their sum.
    [
        (DEFAULTS | {"version": 0.1}, 0, 1680, 32, 2880, None),
        (LARGE, 0, 9792, 23, 5934, None),
        (LARGE, 64, 9792, 23, 5934, 17),
        (DEFAULTS | {"version": 0.1, "prefer_larger_batch": False, "max_gpus": 40}, 7, 1680, 19, 285, 6),
        (DEFAULTS, 8, 1680, 32, 2880, 6),
        (
            {
                "micro_batch_sizes": [5, 10, 16],
                "max_train_batch_size": 2000,
                "num_gpus_per_node": 8,
                "model_parallel_size": 2,
                "min_gpus": 16,
                "max_gpus": 512,
            },
            *(32, 1920, 14, 860, 10),
        ),
        # A number of nodes that the best batch does not fit gets a batch of its own.
        ({"micro_batch_sizes": [24], "max_train_batch_size": 2000, "num_gpus_per_node": 4}, 64, 1536, 1, 64, 24),
        (
            {
                "micro_batch_sizes": [7, 2, 24, 1],
                "max_train_batch_size": 500,
                "num_gpus_per_node": 4,
                "prefer_larger_batch": False,
            },
            *(6, 432, 1, 6, 24),
        ),
    ],
)
def test_a_batch_and_the_ranks_that_fit_it_are_those_of_deepspeed(
    section: dict[str, Any], ranks: int, batch: int, count: int, total: int, micro: int | None
) -> None:
    found = compute_elastic_config(config(**section), VERSION, ranks)
    assert (found[0], len(found[1]), sum(found[1])) == (batch, count, total)
    assert found[2:] == (() if micro is None else (micro,))
    assert found[1] == sorted(found[1])


def test_the_micro_batch_times_the_ranks_divides_the_batch_for_all_that_fit() -> None:
    batch, fitting = compute_elastic_config(config(**LARGE), VERSION)[:2]
    for ranks in fitting:
        micro = compute_elastic_config(config(**LARGE), VERSION, ranks)[-1]
        assert isinstance(micro, int)
        assert batch % (micro * ranks) == 0, ranks


def test_the_job_says_its_ranks_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="number of ranks is not known"):
        compute_elastic_config(config(**DEFAULTS), VERSION)
    with pytest.raises(ElasticityConfigError, match="number of ranks is not known"):
        compute_elastic_config(config(**DEFAULTS, version=0.1), VERSION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert len(compute_elastic_config(config(**DEFAULTS), VERSION)) == 2
    assert compute_elastic_config(config(**DEFAULTS), VERSION, return_microbatch=True)[-1] == 6


def test_a_batch_is_never_larger_than_allowed_nor_empty() -> None:
    # 0.18.3 takes 240 and 0.
    section = {"micro_batch_sizes": [5, 24, 3, 4], "max_train_batch_size": 96}
    assert compute_elastic_config(config(**section), VERSION, 12)[0] == 96
    with pytest.raises(ElasticityIncompatibleWorldSize, match="at most 96 is too small for 128 ranks"):
        compute_elastic_config(config(micro_batch_sizes=[4, 6], max_train_batch_size=96, min_gpus=8), VERSION, 128)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"max_train_batch_size": 10}, "`elasticity.micro_batch_sizes` is missing"),
        (DEFAULTS | {"micro_batch_sizes": [2, 0]}, r"`elasticity.micro_batch_sizes` is \[2, 0\]"),
        (DEFAULTS | {"micro_batch_sizes": 4}, "`elasticity.micro_batch_sizes` is 4"),
        (DEFAULTS | {"micro_batch_sizes": [2, 3000]}, "has 3000, above `max_train_batch_size` 2000"),
        (DEFAULTS | {"min_gpus": 0}, "`elasticity.min_gpus` is 0"),
        (DEFAULTS | {"min_gpus": 9, "max_gpus": 8}, "`elasticity.min_gpus` is 9 and `max_gpus` 8"),
        (DEFAULTS | {"min_time": -1}, "`elasticity.min_time` is -1"),
        (DEFAULTS | {"version": 0.3}, "`elasticity.version` is 0.3"),
        (DEFAULTS | {"version": 0.1, "model_parallel_size": 2}, "`version` 0.1"),
        (DEFAULTS | {"enabled": False}, "`elasticity.enabled` is false"),
    ],
)
def test_a_wrong_section_is_an_error_that_scripts_catch_as_a_value_error(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ElasticityConfigError, match=said) as caught:
        compute_elastic_config(config(**section), VERSION, 4)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InputError)
    assert caught.value.hint


def test_ranks_that_do_not_fit_are_an_error_with_those_that_do() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="a batch of 1680 does not fit 9 ranks; it fits 1, 2, 3"):
        compute_elastic_config(config(**DEFAULTS, version=0.1), VERSION, 9)
    with pytest.raises(ElasticityError, match=r"`elasticity\.num_gpus_per_node` 3 is no multiple"):
        compute_elastic_config(config(**DEFAULTS, num_gpus_per_node=3, model_parallel_size=2), VERSION, 3)
    with pytest.raises(ElasticityError, match=r"DeepSpeed 0\.2\.9 has no elastic batches"):
        compute_elastic_config(config(**DEFAULTS), "0.2.9", 4)
    with pytest.raises(ElasticityConfigError, match="has no section `elasticity`"):
        compute_elastic_config({}, VERSION, 4)


def test_the_section_is_asked_for_and_compared_with_the_schedulers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert elasticity_enabled(config(**DEFAULTS))
    assert not elasticity_enabled({})
    assert not elasticity_enabled({"elasticity": {}})
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    ensure_immutable_elastic_config(DEFAULTS)
    assert "DEEPSPEED_ELASTICITY_CONFIG is not set" in caplog.text
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", '{"micro_batch_sizes": [2, 4, 6], "max_train_batch_size": 2000}')
    ensure_immutable_elastic_config(DEFAULTS)
    with pytest.raises(ElasticityConfigError, match=r"micro_batches is \[2\], and \[2, 4, 6\]"):
        ensure_immutable_elastic_config(DEFAULTS | {"micro_batch_sizes": [2]})
