"""Layers cut into chunks: the least largest chunk, DeepSpeed's numbers, bounds as given."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from dsrun.errors import ConfigError
from dsrun.pipeline_schedules.partition import balance, by_pattern, explicit, uniform


def sums(costs: list[int], bounds: tuple[int, ...]) -> list[int]:
    return [sum(costs[start:end]) for start, end in pairwise(bounds)]


def test_balance_is_the_best_of_all_cuts() -> None:
    draw = random.Random(22)
    for number in range(300):
        free = number % 2  # some layers cost nothing, and stay with the layer before where cuts are as good
        costs = [draw.choice((0, 1, 2, 3, 7) if free else (1, 1, 2, 3, 7)) for _ in range(draw.randint(1, 9))]
        chunks = draw.randint(1, len(costs))
        all_cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), chunks - 1)]

        def rank(bounds: tuple[int, ...], costs: list[int] = costs) -> tuple[int, int, list[int]]:
            parts = sums(costs, bounds)
            return max(parts), sum(part * part for part in parts), parts

        found = balance(costs, chunks)
        assert found in all_cuts
        best = min(map(rank, all_cuts))
        assert rank(found)[:2] == best[:2], (costs, chunks)
        assert free or rank(found) == best, (costs, chunks)


def test_balance_knows_no_rounding_and_finds_the_same_in_any_unit() -> None:
    costs = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.6]
    assert balance(costs, 3) == balance([cost * 2**-30 for cost in costs], 3)
    assert balance([1e300, 1e-300, 1e300, 1e-300], 2) == (0, 2, 4)
    assert balance([2**60 + 1, 2**60, 1, 0], 2) == (0, 1, 4)


def test_balance_counts_a_dear_head_and_gives_the_first_chunk_less_on_ties() -> None:
    assert balance([0.2, *[1.0] * 8, 2.4], 4) == (0, 3, 6, 9, 10)
    assert balance([1.0] * 5, 2) == (0, 2, 5)


def test_balance_leaves_layers_of_no_cost_with_the_layer_before() -> None:
    assert balance([1, 1, 0, 1, 1], 2) == (0, 3, 5)
    assert balance([0, 0, 0], 3) == (0, 1, 2, 3)


def test_balance_of_many_layers_is_quick() -> None:
    draw = random.Random(22)
    bounds = balance([draw.random() for _ in range(300)], 32)
    assert len(bounds) == 33


def test_uniform_gives_the_first_chunks_a_layer_more() -> None:
    assert uniform(8, 4) == (0, 2, 4, 6, 8)
    assert uniform(11, 4) == (0, 3, 6, 9, 11)
    assert uniform(3, 3) == (0, 1, 2, 3)


def test_patterns_count_matching_classes_without_regard_to_case() -> None:
    names = ["Embedding", "Block", "Block", "Block", "Block", "Norm", "Head"]
    assert by_pattern(names, "block", 2) == (0, 3, 7)
    assert by_pattern(names, "^(embedding|head)$", 2) == (0, 6, 7)
    assert by_pattern(names, "block|head", 5) == (0, 2, 3, 4, 6, 7)


def test_bounds_as_given_are_checked() -> None:
    assert explicit([0, 1, 4, 6], 6, 3) == (0, 1, 4, 6)
    for bounds, words in (
        ([0, 3, 6], "bounds [0, 3, 6] make 2 chunks; expected 3"),
        ([0, 6], "bounds [0, 6] make 1 chunk; expected 3"),
        ([1, 2, 4, 6], "go from 1 to 6; expected 0 to 6"),
        ([0, 2, 4, 5], "go from 0 to 5; expected 0 to 6"),
        ([0, 4, 4, 6], "give chunk 1 no layer: it goes from 4 to 4"),
        ([0, 5, 4, 6], "give chunk 1 no layer: it goes from 5 to 4"),
    ):
        with pytest.raises(ConfigError) as refused:
            explicit(bounds, 6, 3)
        assert words in str(refused.value)
        assert str(refused.value).startswith(f"`pipeline.partition`: bounds {bounds} ")
        assert refused.value.hint is not None
        with pytest.raises(ConfigError, match=r"^PipelineModule: partition_method: bounds"):
            explicit(bounds, 6, 3, label="PipelineModule: partition_method")


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    for cut in (lambda: balance([1.0, 2.0], 3), lambda: uniform(2, 3), lambda: by_pattern(["A", "B"], "a", 3)):
        with pytest.raises(ConfigError, match="2 layers cannot make 3 chunks"):
            cut()
    with pytest.raises(ConfigError, match="number of chunks is 0"):
        uniform(2, 0)
    with pytest.raises(ConfigError, match="cost of layer 1 is nan"):
        balance([1.0, float("nan")], 1)
    with pytest.raises(ConfigError, match="cost of layer 0 is -1"):
        balance([-1, 1], 1)
    with pytest.raises(ConfigError, match=r"^`pipeline.partition`: `type:mamba` matches none of the layers Block"):
        by_pattern(["Block", "Head", "Block"], "mamba", 2)
    with pytest.raises(ConfigError, match=r"^`pipeline.partition`: `type:\(` is no regular expression"):
        by_pattern(["Block"], "(", 1)
