"""What a rank moves over each axis: counted by hand for one small model, and where its peers stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.config.axes import divide
from dsrun.estimate.memory.model_state import pad_units
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.model.units import ModelSize, from_architecture
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.axes import AxisTraffic, _peers_per_host, axis_traffic

SHAPE = Architecture(layers=4, hidden=128, intermediate=512, heads=4, kv_heads=4, head_dim=32, vocab=1024)
MATRICES, NORM, EMBEDDING = 262_144, 128, 131_072
MICROS, SEQ = 4, 64
#: Bytes of an activation of all micro batches.
ACTIVATION = 128 * SEQ * 2 * MICROS
BASE = RunSettings(compute_bytes=2, stage=1, sequence=SEQ, accumulation_steps=MICROS, once_an_update=True)


def machine(ranks: int, per_host: int = 8) -> Machine:
    return Machine(
        label="m",
        ranks=ranks,
        ranks_per_host=per_host,
        gpu_memory_bytes=1 << 40,
        given=Speeds(flops=1e12, memory=1e12, peer=1e10, network=8e9),
    )


def moved(
    settings: RunSettings, ranks: int, *, stage: int = 0, model: ModelSize | None = None, per_host: int = 8
) -> dict[tuple[str, int], AxisTraffic]:
    parts = cut_into_stages(model or from_architecture(SHAPE, label="m"), settings)
    shard = settings.ranks_of("shard", ranks)
    units = pad_units(
        parts[stage].model.units, shard, tensor_parallel=settings.tensor_parallel, by_block=settings.stages > 1
    )
    found = axis_traffic(parts[stage], units, settings, machine(ranks, per_host))
    assert len({(one.axes, one.ranks) for one in found}) == len(found)
    # The two that have as many ranks are told apart by their axes.
    return {(one.name, one.ranks if "pipe" not in one.axes else -one.ranks): one for one in found}


def of_axes(**sizes: int) -> RunSettings:
    return replace(BASE, axis_sizes=sizes)


def test_what_the_tensor_axis_cuts_is_kept_equal_among_fewer_ranks_than_what_it_leaves_whole() -> None:
    found = moved(of_axes(tensor=2), 8)
    assert found.keys() == {("data", 4), ("data", 8), ("tensor", 2)}
    cut = 4 * MATRICES // 2 + EMBEDDING // 2
    assert found["data", 4].buffers == {"reduce_scatter": 4 * cut, "all_gather": 2 * cut}, "in fp32, and in 16 bits"
    whole = EMBEDDING + 2048  # nine norms of 128 elements in slices of 256 for eight ranks
    assert found["data", 8].buffers == {"reduce_scatter": 4 * whole, "all_gather": 2 * whole}


def test_layers_sum_four_activations_and_the_head_one_and_three_numbers_a_token() -> None:
    (tensor,) = (one for (name, _), one in moved(of_axes(tensor=2), 8).items() if name == "tensor")
    assert tensor.buffers == {"all_reduce": (4 * 4 + 1) * ACTIVATION + 3 * 4 * SEQ * MICROS}
    assert tensor.sent_bytes == tensor.buffers["all_reduce"], "twice, times a half"
    sliced = moved(replace(of_axes(tensor=2), sequence_slices=True), 8)["tensor", 2]
    assert sliced.buffers == {
        "all_gather": (4 * 4 + 2) * ACTIVATION,
        "reduce_scatter": 4 * 4 * ACTIVATION,
        "all_reduce": ACTIVATION + 3 * 4 * SEQ * MICROS,
    }


def test_a_tied_embedding_is_summed_over_both_ends_before_their_replicas() -> None:
    tied = from_architecture(replace(SHAPE, tied=True), label="m")
    settings = of_axes(pipe=2, tensor=2)
    first, last = (moved(settings, 8, stage=stage, model=tied) for stage in (0, 1))
    # Two stages, two data ranks; a half of the vocabulary.
    for stage in (first, last):
        assert stage["data", -4].buffers == {"reduce_scatter": 4 * EMBEDDING // 2, "all_gather": 2 * EMBEDDING // 2}
        assert stage["pipe", -2].buffers == {"all_reduce": 4 * EMBEDDING // 2}
    assert first["tensor", 2].buffers == {"all_reduce": (4 * 2 + 1) * ACTIVATION}, "its outputs are sums"


def test_rings_gather_keys_twice_and_ulysses_exchanges_heads() -> None:
    keys = 2 * 128 * SEQ * 2 * MICROS * 4
    assert moved(of_axes(ring=2), 4)["context", 2].buffers == {"all_gather": 2 * keys, "reduce_scatter": keys}
    exchanged = 2 * (4 * 128) * (SEQ // 2) * 2 * MICROS * 4
    assert moved(of_axes(ulysses=2), 4)["context", 2].buffers == {"all_to_all": exchanged}
    # One head of keys for two ranks of a layer: each has it, and half of the queries.
    model = from_architecture(replace(SHAPE, kv_heads=1), label="m")
    one = SEQ // 2 * 32 * 2 * MICROS * 4
    found = moved(of_axes(ring=2, tensor=2), 8, model=model)["context", 2]
    assert found.buffers == {"all_gather": 2 * 2 * 2 * one, "reduce_scatter": 2 * 2 * one}
    found = moved(of_axes(ulysses=2, tensor=2), 8, model=model)["context", 2]
    assert found.buffers == {"all_to_all": 2 * (2 * 2 + 2 * 1) * one}


@pytest.mark.parametrize(
    ("per_host", "name", "ranks", "local"),
    [
        (8, "tensor", 2, 2),
        (8, "data", 4, 4),
        (8, "data", 8, 8),
        (4, "data", 4, 2),
        (2, "data", 4, 1),
        (1, "tensor", 2, 1),
    ],
)
def test_peers_of_a_host_are_counted_by_the_strides_of_their_axes(
    per_host: int, name: str, ranks: int, local: int
) -> None:
    one = moved(of_axes(tensor=2), 8, per_host=per_host)[name, ranks]
    assert (one.peers_per_host, one.crosses_hosts) == (local, local < ranks)


@pytest.mark.parametrize(
    ("ranks", "per_host", "sizes", "name"),
    [
        (12, 6, {"tensor": 4}, "tensor"),
        (12, 6, {"pipe": 3}, "data"),
        (12, 6, {"pipe": 3, "tensor": 2}, "data"),
        (12, 4, {"tensor": 3}, "tensor"),
        (10, 5, {"tensor": 2}, "tensor"),
        (12, 8, {"tensor": 3}, "tensor"),
        (16, 8, {"tensor": 4, "pipe": 2}, "data"),
        (12, 6, {"tensor": 3}, "tensor"),
    ],
)
def test_a_set_that_begins_in_one_host_and_ends_in_the_next_spans_hosts(
    ranks: int, per_host: int, sizes: dict[str, int], name: str
) -> None:
    spec = divide(ranks, sizes)
    view = spec.wide([name])
    each = [{rank // per_host for rank in group} for group in spec.groups(view)]
    spans = any(len(hosts) > 1 for hosts in each)
    assert (_peers_per_host(spec, view, per_host) < spec.size(view)) == spans


def test_sets_of_ranks_that_span_hosts_share_the_network_and_layers_are_waited_for() -> None:
    settings = of_axes(tensor=2)
    prediction = predict(from_architecture(SHAPE, label="m"), settings, machine(8, per_host=4))
    seconds = {floor.path: floor for floor in prediction.paths}
    by_name = {(one.name, one.ranks): one for one in prediction.traffic.axes}
    # Of 4 ranks a host, two sets of four and one of eight go out by the same network.
    over_network = by_name["data", 4].sent_bytes * 2 + by_name["data", 8].sent_bytes
    assert seconds["data"].seconds == pytest.approx(over_network / 8e9)
    assert seconds["tensor"].seconds == pytest.approx(by_name["tensor", 2].sent_bytes / 1e10)
    series = sum(seconds[name].seconds or 0 for name in ("compute", "optimizer", "tensor"))
    assert prediction.step.seconds == pytest.approx(max(series, seconds["data"].seconds or 0))
    overlapped = predict(from_architecture(SHAPE, label="m"), replace(settings, tensor_overlaps=True), machine(8))
    assert {floor.path: floor.seconds for floor in overlapped.paths}["tensor"] == pytest.approx(
        by_name["tensor", 2].sent_bytes / 1e10 / 2
    )
