"""Bytes and work of a step, and the times they need at least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.estimate.memory.model_state import pad_units
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.model.units import UnitGroup, from_architecture, from_count
from dsrun.estimate.prediction import predict
from dsrun.estimate.run.catalogue import find_gpu
from dsrun.estimate.run.machine import Machine, Speeds
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.axes import AxisTraffic
from dsrun.estimate.time.collectives import collective_bytes, gathered_numel
from dsrun.estimate.time.steps import Floor, floors, model_flops, step_floor, step_traffic, update_bytes

BF16 = RunSettings(compute_bytes=2, sequence=1024)
UNITS = pad_units([UnitGroup("blocks", 1024, count=4), UnitGroup("rest", 512, has_module=False)], 2)
WHOLE = 4 * 1024 + 512
H100 = find_gpu("H100-80G")
LLAMA_1B = Architecture(layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocab=128_256)


def machine(ranks: int = 8, *, per_host: int = 8, **given: float) -> Machine:
    return Machine(
        label="test",
        ranks=ranks,
        ranks_per_host=min(ranks, per_host),
        gpu=H100,
        gpu_memory_bytes=H100.memory_bytes,
        given=Speeds(**given),
    )


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_gradients_are_reduced_in_every_micro_step(micro_steps: int) -> None:
    settings = replace(BF16, accumulation_steps=micro_steps)
    assert collective_bytes(UNITS, settings).all_reduce == 2 * WHOLE * micro_steps
    assert collective_bytes(UNITS, replace(settings, stage=1)).reduce_scatter == 2 * WHOLE * micro_steps


def test_stages_1_and_2_gather_parameters_once_a_step() -> None:
    for stage in (1, 2):
        assert collective_bytes(UNITS, replace(BF16, stage=stage, accumulation_steps=3)).all_gather == 2 * WHOLE


def test_stage_3_gathers_what_its_slots_do_not_hold() -> None:
    # Forward: all. Backward: units 3 and 2 are still there, the rest unit always is.
    assert gathered_numel(UNITS, 1) == WHOLE + 2 * 1024
    # Each further micro step: forward finds units 0 and 1, backward units 3 and 2.
    assert gathered_numel(UNITS, 3) == WHOLE + 2 * 1024 + 2 * 4 * 1024


def test_flops_are_six_a_parameter_and_token_and_attention() -> None:
    model = from_count(7 * 10**9)
    shape = model.architecture
    assert shape is not None
    multiplied = 7 * 10**9 - 32000 * 4096
    assert model_flops(model, BF16) == pytest.approx(1024 * (6 * multiplied + 6 * 32 * 4096 * 1024))


@pytest.mark.parametrize(("stages", "blocks"), [(1, 16), (2, 8)])
def test_recomputation_makes_blocks_again_and_no_output_layer(stages: int, blocks: int) -> None:
    """A block: 3 x 2,048 x 8,192 of the MLP, 2,048 x (2 x 2,048 + 2 x 512) of attention, two norms; 16 of them."""
    block, head = 50_331_648 + 10_485_760 + 4_096, 128_256 * 2_048
    # 2 FLOPs a parameter and token, and causal attention's 2 x width x sequence.
    forward = 2 * block + 2 * 2_048 * 1_024
    model = from_architecture(LLAMA_1B, label="1B")
    settings = replace(BF16, axis_sizes={"pipe": stages}, partition="uniform")
    stage = cut_into_stages(model, settings)[-1]
    kept = model_flops(model, settings, stage=stage)
    again = model_flops(model, replace(settings, recompute="blocks"), stage=stage)
    assert kept == pytest.approx(1_024 * 3 * (blocks * forward + 2 * head), rel=1e-5), "but for the last norm"
    assert again - kept == pytest.approx(1_024 * blocks * forward, rel=1e-5)


def test_all_of_a_model_whose_layers_are_not_known_is_made_again() -> None:
    model = replace(from_count(10**9), architecture=None)
    assert model_flops(model, replace(BF16, recompute="blocks")) / model_flops(model, BF16) == pytest.approx(4 / 3)


def test_a_predicted_run_recomputes_no_output_layer() -> None:
    """Where attention has a fused kernel, its backward has five products for four."""
    model = from_architecture(LLAMA_1B, label="1B")
    flops = {how: predict(model, replace(BF16, recompute=how), machine()).traffic.flops for how in ("none", "blocks")}
    forward = 2 * 60_821_504 + 2 * 2_048 * 1_024
    assert flops["blocks"] - flops["none"] == pytest.approx(1_024 * 16 * forward, rel=1e-5)


def test_frozen_parameters_save_their_own_gradient() -> None:
    model = replace(from_count(10**9), architecture=None)
    adapters = model.with_trained(10**6)
    assert model_flops(adapters, BF16) == 1024 * (4 * 10**9 + 2 * 10**6)


def test_the_update_moves_28_bytes_an_element_in_fp32_and_the_parameter_in_bf16() -> None:
    assert update_bytes(1000, RunSettings(compute_bytes=4)) == 28_000
    assert update_bytes(1000, BF16) == 30_000


def test_an_offloaded_optimizer_crosses_pcie_once_each_way() -> None:
    settings = replace(BF16, stage=3, offload_optimizer="cpu")
    traffic = step_traffic(from_count(10**6), UNITS, settings, machine(2))
    owned = WHOLE // 2
    assert (traffic.pcie_to_gpu_bytes, traffic.pcie_to_host_bytes) == (2 * owned, 2 * owned)
    # One pass of 28 bytes an element over states, gradient and parameter, and the copies' own 4; of both ranks.
    assert traffic.ddr_bytes == 32 * owned * 2
    assert traffic.optimizer_bytes == 0
    ahead = step_traffic(from_count(10**6), UNITS, replace(settings, steps_ahead=True), machine(2))
    assert ahead.ddr_bytes == (32 + 12) * owned * 2, "out of place, into memory that is read before it is written"
    assert ahead.pcie_to_gpu_bytes == traffic.pcie_to_gpu_bytes


def test_inputs_on_a_disk_are_written_but_for_two_and_read_but_for_those_in_memory_in_every_micro_step() -> None:
    model = from_count(7 * 10**9)
    assert model.architecture is not None
    one, blocks = model.architecture.hidden * 1024 * 2, model.architecture.layers
    settings = replace(
        BF16, stage=1, recompute="blocks", activations_on_cpu=True, activation_buffers=5, accumulation_steps=3
    )
    traffic = step_traffic(model, UNITS, settings, machine(2))
    assert traffic.nvme_write_bytes == (blocks - 2) * one * 3 * 2
    assert traffic.nvme_read_bytes == (blocks - 5) * one * 3 * 2


def test_an_nvme_optimizer_reads_and_writes_12_bytes_an_element() -> None:
    settings = replace(BF16, stage=3, offload_optimizer="nvme")
    traffic = step_traffic(from_count(10**6), UNITS, settings, machine(2))
    assert traffic.nvme_read_bytes == traffic.nvme_write_bytes == 12 * WHOLE // 2 * 2
    assert traffic.ddr_bytes == (32 + 24) * WHOLE // 2 * 2


def test_parameters_on_nvme_are_read_as_often_as_they_stream_but_for_those_that_stay() -> None:
    units = pad_units([UnitGroup("blocks", 1024, count=8)], 2)
    settings = replace(BF16, stage=3, offload_optimizer="nvme", offload_param="nvme", params_in_memory=2 * 512 + 5)
    traffic = step_traffic(from_count(10**6), units, settings, machine(2))
    states = 12 * 8 * 512
    assert traffic.nvme_read_bytes == 2 * (states + traffic.pcie_to_gpu_bytes * 6 // 8)
    assert traffic.nvme_write_bytes == 2 * (states + 2 * 6 * 512)


def test_streamed_parameters_come_twice_in_every_micro_step_but_for_what_lies_in_a_slot() -> None:
    settings = replace(BF16, stage=3, offload_optimizer="cpu", offload_param="cpu", accumulation_steps=4)
    units = pad_units([UnitGroup("blocks", 1024, count=8)], 2)
    traffic = step_traffic(from_count(10**6), units, settings, machine(2))
    slice_bytes = 2 * 1024 // 2
    # 8 forward, and from then on each pass finds the two blocks that the one before it left.
    assert traffic.pcie_to_gpu_bytes == (8 + 7 * 6) * slice_bytes
    assert traffic.pcie_to_host_bytes == 8 * 2 * slice_bytes, "sums of gradients, in fp32"
    assert traffic.pcie_to_gpu_bytes * 2 == collective_bytes(units, settings).all_gather
    one = replace(settings, gather=GatherBudgets(ahead=0), accumulation_steps=1)
    assert step_traffic(from_count(10**6), units, one, machine(2)).pcie_to_gpu_bytes == (8 + 7) * slice_bytes


def test_new_parameters_cross_back_where_the_optimizer_stays() -> None:
    settings = replace(BF16, stage=3, offload_param="cpu")
    units = pad_units([UnitGroup("blocks", 1024, count=8)], 2)
    traffic = step_traffic(from_count(10**6), units, settings, machine(2))
    assert traffic.pcie_to_host_bytes == 8 * 1024
    assert traffic.pcie_to_gpu_bytes == (8 + 6) * 1024
    assert traffic.optimizer_bytes == update_bytes(8 * 512, settings)


def test_in_fp32_trained_parameters_stay_with_their_optimizer_and_frozen_ones_leave() -> None:
    settings = RunSettings(stage=3, compute_bytes=4, offload_param="cpu", micro_batch=1)
    units = pad_units([UnitGroup("blocks", 1024, count=8, frozen=2048, frozen_numel=2048)], 2)
    traffic = step_traffic(from_count(10**6), units, settings, machine(2))
    # A step later the frozen ones of the first two blocks are still in their slots.
    assert traffic.pcie_to_gpu_bytes == (6 + 6) * 4 * 2048 // 2
    assert traffic.pcie_to_host_bytes == 0
    both = step_traffic(from_count(10**6), units, replace(settings, offload_optimizer="cpu"), machine(2))
    assert both.pcie_to_gpu_bytes == traffic.pcie_to_gpu_bytes + (8 + 6) * 4 * 1024 // 2


def test_floors_are_amounts_over_achievable_speeds() -> None:
    prediction = predict(from_count(7 * 10**9), replace(BF16, stage=1), machine())
    seconds = {floor.path: floor.seconds for floor in prediction.paths}
    assert seconds["compute"] == pytest.approx(prediction.traffic.flops / (0.8 * 989e12))
    assert seconds["optimizer"] == pytest.approx(prediction.traffic.optimizer_bytes / (0.9 * 3350e9))
    assert seconds["data"] == pytest.approx(prediction.traffic.network_bytes / (0.8 * 450e9))


def test_over_several_hosts_the_hosts_network_is_the_narrowest() -> None:
    prediction = predict(from_count(7 * 10**9), replace(BF16, stage=1), machine(16, network=100e9))
    seconds = {floor.path: floor.seconds for floor in prediction.paths}
    assert seconds["data"] == pytest.approx(prediction.traffic.network_bytes / 100e9)


@pytest.mark.parametrize(("peer", "seconds"), [(1e8, 800 / 1e8), (1e6, 800 / 1e6)])
def test_sets_over_hosts_send_within_their_hosts_too(peer: float, seconds: float) -> None:
    """Of 16 ranks 2 sets of 8 send 800 bytes a rank: both through a host's network, and each from rank to rank."""
    on_cpu = Machine(label="c", ranks=16, ranks_per_host=8, given=Speeds(peer=peer, network=2e8))
    data = AxisTraffic(name="data", axes=("data",), ranks=8, peers_per_host=4, buffers={"send": 800})
    traffic = replace(step_traffic(from_count(10**6), UNITS, BF16, on_cpu), axes=(data,))
    (floor,) = (one for one in floors(traffic, BF16, on_cpu) if one.path == "data")
    assert floor.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("peers", "factor"), [(8, 4.0), (4, 2 * 1.5)])
def test_ranks_that_wait_within_a_host_share_its_cores_and_over_hosts_the_schedule(peers: int, factor: float) -> None:
    """Four ranks a core and a step stretched by half; over hosts two sets take turns on the network."""
    on_cpu = Machine(label="c", ranks=16, ranks_per_host=8, cores_per_host=2, given=Speeds(peer=1e8, network=1e8))
    axis = AxisTraffic(name="tensor", axes=("tensor",), ranks=8, peers_per_host=peers, buffers={"send": 800})
    traffic = replace(step_traffic(from_count(10**6), UNITS, BF16, on_cpu), axes=(axis,))
    (floor,) = (one for one in floors(traffic, BF16, on_cpu, stretch=1.5) if one.path == "tensor")
    assert floor.seconds == pytest.approx(factor * 800 / 1e8)


def test_a_path_whose_speed_is_not_known_says_which() -> None:
    on_cpu = Machine(label="cpu", ranks=2, ranks_per_host=2)
    data = AxisTraffic(name="data", axes=("data",), ranks=2, peers_per_host=2, buffers={"all_reduce": 1})
    paths = floors(step_traffic(from_count(10**6), UNITS, BF16, on_cpu, axes=(data,)), BF16, on_cpu)
    assert paths == (
        Floor("compute", None, ("flops",), in_series=True),
        Floor("optimizer", None, ("memory",), in_series=True),
        Floor("data", None, ("peer",)),
    )
    assert step_floor(paths).seconds is None


def test_a_step_takes_the_longest_path_and_the_update_follows_backward() -> None:
    paths = [Floor("compute", 2.0, in_series=True), Floor("optimizer", 0.5, in_series=True), Floor("data", 2.2)]
    assert step_floor(paths).seconds == 2.5
    assert step_floor(paths).bottleneck == "compute"
    paths.append(Floor("DDR", 4.0))
    assert (step_floor(paths).seconds, step_floor(paths).bottleneck) == (4.0, "DDR")
    paths.append(Floor("NVMe", None, "nvme_read"))
    assert not step_floor(paths).complete
