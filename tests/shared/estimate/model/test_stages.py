"""A model is cut at its blocks by what they cost, embedding and head counted, and nothing gets lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.errors import ConfigError
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import cut_into_stages, head_in_blocks
from dsrun.estimate.model.units import ModelSize, UnitGroup, from_architecture, from_count
from dsrun.estimate.run.settings import RunSettings

#: A block has 4 x 128 x 128 + 3 x 128 x 512 + 2 x 128 = 262,400 parameters.
SHAPE = Architecture(layers=8, hidden=128, intermediate=512, heads=4, kv_heads=4, head_dim=32, vocab=1000)
BLOCK, EMBEDDING, NORM = 262_400, 128_000, 128
#: FLOPs of a token's forward: 2 a parameter, and attention 2 x width x 64 tokens.
BLOCK_COST, HEAD_COST = 2 * BLOCK + 2 * 128 * 64, 2 * EMBEDDING


def settings(stages: int, chunks: int = 1, **others: object) -> RunSettings:
    base = RunSettings(compute_bytes=2, sequence=64, axis_sizes={"pipe": stages}, chunks_per_rank=chunks)
    return replace(base, **others)


def test_one_stage_is_the_model_itself() -> None:
    model = from_architecture(SHAPE, label="m")
    (stage,) = cut_into_stages(model, settings(1))
    assert stage.model is model
    assert (stage.blocks, stage.cost, stage.has_embedding, stage.has_head) == ((8,), 1.0, True, True)
    assert stage.block_cost == pytest.approx(8 * BLOCK_COST / (8 * BLOCK_COST + HEAD_COST))
    unknown = replace(model, architecture=None)
    assert cut_into_stages(unknown, settings(1))[0].block_cost == 1.0, "all of it counts as blocks"


def test_two_stages_have_four_blocks_each_where_the_head_costs_half_a_block() -> None:
    first, last = cut_into_stages(from_architecture(SHAPE, label="m"), settings(2))
    whole = 8 * BLOCK_COST + HEAD_COST
    assert (first.blocks, last.blocks) == ((4,), (4,))
    assert (first.cost, last.cost) == (4 * BLOCK_COST / whole, (4 * BLOCK_COST + HEAD_COST) / whole)
    assert (first.block_cost, last.block_cost) == (first.cost, pytest.approx(first.cost)), "the head is none"
    assert (first.has_embedding, first.has_head, last.has_embedding, last.has_head) == (True, False, False, True)
    assert (first.model.numel, last.model.numel) == (EMBEDDING + 4 * BLOCK, 4 * BLOCK + EMBEDDING + NORM)


def test_a_large_head_takes_blocks_from_the_last_stage() -> None:
    """A head of 4.7 blocks: 6 blocks against 2 and the head, 6.7, is the least that the longer stage can have."""
    first, last = cut_into_stages(from_architecture(replace(SHAPE, vocab=10_000), label="m"), settings(2))
    assert (first.blocks, last.blocks) == ((6,), (2,))
    first, last = cut_into_stages(
        from_architecture(replace(SHAPE, vocab=10_000), label="m"), settings(2, partition="uniform")
    )
    assert (first.blocks, last.blocks) == ((4,), (4,))


def test_parameters_count_an_embedding_that_costs_no_time() -> None:
    """Embedding and head have 4.9 blocks each: parameters balance at four blocks, time does not."""
    model = from_architecture(replace(SHAPE, vocab=10_000), label="m")
    assert [one.blocks for one in cut_into_stages(model, settings(2, partition="parameters"))] == [(4,), (4,)]


def test_bounds_are_taken_as_they_are() -> None:
    stages = cut_into_stages(from_architecture(SHAPE, label="m"), settings(2, partition=(0, 1, 8)))
    assert [one.blocks for one in stages] == [(1,), (7,)]


def test_bounds_of_another_model_are_refused_by_their_key() -> None:
    with pytest.raises(ConfigError) as refused:
        cut_into_stages(from_architecture(SHAPE, label="m"), settings(2, partition=(0, 4, 9)))
    assert refused.value.render() == (
        "error: `pipeline.partition`: bounds [0, 4, 9] go from 0 to 9; expected 0 to 8, all layers\n"
        "hint: write 0 in front and 8, the number of layers, at the end"
    )


def test_interleaved_chunks_lie_in_turns_and_a_v_has_both_ends_on_the_first_rank() -> None:
    model = from_architecture(SHAPE, label="m")
    turns = cut_into_stages(model, settings(2, 2, schedule="interleaved"))
    assert [one.blocks for one in turns] == [(2, 2), (2, 2)]
    assert [(one.has_embedding, one.has_head) for one in turns] == [(True, False), (False, True)]
    both, inner = cut_into_stages(model, settings(2, 2, schedule="zbv"))
    assert (both.has_embedding, both.has_head, inner.has_embedding, inner.has_head) == (True, True, False, False)


def test_units_know_their_chunk_and_the_head_is_in_the_last_one() -> None:
    turns = settings(2, 2, schedule="breadth_first")
    first, last = cut_into_stages(from_architecture(SHAPE, label="m"), turns)
    of_first = [(unit.chunk, unit.count, unit.numel) for unit in first.model.units if unit.has_module]
    assert of_first == [(0, 1, EMBEDDING), (0, 2, BLOCK), (1, 2, BLOCK)]
    of_last = [(unit.chunk, unit.count, unit.numel) for unit in last.model.units if unit.has_module]
    assert of_last == [(0, 2, BLOCK), (1, 2, BLOCK), (1, 1, EMBEDDING)]


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("frozen", [0, 1_000_000])
def test_every_parameter_is_on_one_stage(stages: int, frozen: int) -> None:
    model = from_architecture(SHAPE, label="m")
    model = model.with_trained(model.numel - frozen) if frozen else model
    parts = cut_into_stages(model, settings(stages))
    for count in ("trained_numel", "frozen_numel"):
        units = {"trained_numel": "numel", "frozen_numel": "frozen_numel"}[count]
        assert sum(getattr(one.model, count) for one in parts) == sum(
            getattr(unit, units) * unit.count for unit in model.units
        ) + (model.frozen_numel - sum(u.frozen_numel * u.count for u in model.units) if "frozen" in count else 0)
    assert sum(one.cost for one in parts) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("ranks", "slices"), [(2, False), (4, False), (4, True)])
def test_ranks_beyond_the_heads_of_keys_hold_their_projections_whole(ranks: int, slices: bool) -> None:
    """Two heads of 32: 2 x 64 x (128 + 1) with biases; with slices they are a unit with the norms."""
    model = from_architecture(replace(SHAPE, kv_heads=2, qkv_bias=True), label="m")
    keys, norms = 2 * 64 * 129 if ranks > 2 else 0, 2 * 128
    expected = (norms + keys, 0) if slices else (norms, keys)
    for stages in (1, 2):
        shared = settings(stages, axis_sizes={"pipe": stages, "tensor": ranks}, sequence_slices=slices)
        for stage in cut_into_stages(model, shared):
            found = {(unit.uncut, unit.repeated) for unit in stage.model.units if "blocks" in unit.name}
            assert found == {expected}
            others = [unit for unit in stage.model.units if "blocks" not in unit.name]
            assert not any(unit.repeated for unit in others)
    (one,) = cut_into_stages(
        from_architecture(replace(SHAPE, kv_heads=2, layers=1), label="m"), settings(1, axis_sizes={"tensor": 4})
    )
    assert [unit.repeated for unit in one.model.units] == [0, 2 * 64 * 128, 0, 0], "the embedding is no block"
    larger = from_count(69 * 10**9)
    shape = larger.architecture
    assert shape is not None
    many = replace(shared, axis_sizes={"tensor": 2 * shape.kv_heads}, sequence_slices=False)
    (whole,) = cut_into_stages(larger, many)
    (blocks,) = (unit for unit in whole.model.units if unit.name == "blocks")
    assert blocks.repeated == pytest.approx(shape.kv_numel * min(1, blocks.numel / shape.block_numel), abs=1)


def test_a_tied_embedding_is_on_both_ends() -> None:
    first, inner, _, last = cut_into_stages(from_architecture(replace(SHAPE, tied=True), label="m"), settings(4))
    assert first.model.numel == EMBEDDING + 2 * BLOCK
    assert last.model.numel == EMBEDDING + NORM + 2 * BLOCK
    assert [unit.stages for unit in last.model.units] == [1, 1, 2], "blocks, the last norm, and what both ends share"
    assert inner.model.numel == 2 * BLOCK


def test_units_that_a_run_has_told_one_by_one_are_cut_by_their_parameters() -> None:
    units = tuple(UnitGroup(f"u{n}", numel) for n, numel in enumerate((400, 100, 100, 100, 100)))
    model = ModelSize(label="m", units=(*units, UnitGroup("rest", 7, has_module=False)), trained_numel=807)
    first, last = cut_into_stages(model, settings(2))
    assert (first.blocks, last.blocks) == ((1,), (4,))
    assert (first.model.numel, last.model.numel) == (400, 407)
    assert [stage.block_costs for stage in (first, last)] == [stage.costs for stage in (first, last)]


def test_embedding_and_head_are_chunks_of_their_own_where_blocks_are_too_few() -> None:
    """As Llama 3 405B is cut: 126 blocks and both ends are 16 stages of 8 chunks."""
    stages = cut_into_stages(from_architecture(SHAPE, label="m"), settings(5, 2, schedule="interleaved"))
    assert [stage.blocks for stage in stages] == [(0, 1), (1, 1), (1, 1), (1, 1), (1, 0)]
    total = 8 * BLOCK_COST + HEAD_COST
    assert stages[0].costs == pytest.approx((0, BLOCK_COST / total))
    assert stages[-1].costs == pytest.approx((BLOCK_COST / total, HEAD_COST / total))
    assert stages[-1].block_costs == pytest.approx((BLOCK_COST / total, 0))
    assert sum(stage.cost for stage in stages) == pytest.approx(1), "the head's cost is told of one chunk alone"
    assert [stage.costs for stage in stages[1:-1]] == [pytest.approx((BLOCK_COST / total,) * 2)] * 3
    assert sum(stage.model.numel for stage in stages) == from_architecture(SHAPE, label="m").numel


def test_a_head_is_worth_blocks() -> None:
    shape = from_count(8 * 10**9).architecture
    assert shape is not None
    assert head_in_blocks(shape, 0) == pytest.approx(2.41, abs=0.005)
    assert head_in_blocks(SHAPE, 64) == pytest.approx(HEAD_COST / BLOCK_COST)


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 8 blocks, and each chunk needs one") as error:
        cut_into_stages(from_architecture(SHAPE, label="m"), settings(8, 2, schedule="interleaved"))
    assert error.value.render().endswith("hint: use fewer stages or `virtual_stages`")


@pytest.mark.parametrize(("ranks", "is_taken"), [(2, True), (3, True), (8, True), (6, False), (16, False)])
def test_a_model_whose_heads_cannot_be_dealt_to_the_ranks_is_refused(ranks: int, is_taken: bool) -> None:
    """As the runtime deals them: four groups of two queries each."""
    model = from_architecture(replace(SHAPE, heads=8, head_dim=16), label="m")
    cut = settings(2, axis_sizes={"pipe": 2, "tensor": ranks})
    if is_taken:
        assert len(cut_into_stages(model, cut)) == 2
        return
    with pytest.raises(ConfigError) as error:
        cut_into_stages(model, cut)
    assert error.value.render() == (
        f"error: `tensor_parallel.autotp_size` {ranks}: the model has 8 heads of queries and 4 of keys, "
        f"which {ranks} ranks cannot share\n"
        "hint: use a size that divides 8, and is a multiple or a divisor of 4"
    )


def test_units_are_as_large_as_those_of_the_rank_with_the_most_heads() -> None:
    """Of 4 heads with keys of their own 3 ranks have 2, 1 and 1, and of 512 columns of the MLP 171, 171 and 170."""
    model = from_architecture(SHAPE, label="m")
    (stage,) = cut_into_stages(model, settings(1, axis_sizes={"tensor": 3}))
    (blocks,) = (unit for unit in stage.model.units if unit.name == "blocks")
    fullest = 128 * 4 * 64 + 3 * 128 * 171
    assert blocks.numel == pytest.approx(3 * fullest + 2 * 128, abs=3)
    (even,) = cut_into_stages(model, settings(1, axis_sizes={"tensor": 2}))
    assert even.model.units == model.units
