"""Engines whose layers are cut over ranks, against engines with one rank on that axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import DsrunError, ModelError
from dsrun.runtime.mesh.collectives import Traffic
from support.covering import covering
from support.inside_engine import mesh_of
from support.llama import MICRO, TIME, VOCAB, Ended, TinyLlama, llama, on_threads, settings, tokens, train
from support.models import loss_of
from support.ranks import run_ranks

RECOMPUTED: dict[str, Any] = {"activation_checkpointing": {"policy": "every_block"}}


def options(**more: Any) -> dict[str, Any]:
    return more


def assert_close(found: Ended, expected: Ended, *, rel: float = 1e-5) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=rel)
    assert found.norms == pytest.approx(expected.norms, rel=10 * rel)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=100 * rel, atol=10 * rel, msg=name)


def assert_same(found: Ended, expected: Ended) -> None:
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name


@pytest.fixture(scope="module")
def one_rank() -> Ended:
    return on_threads(1, 1)[0]


@pytest.mark.parametrize(
    ("stage", "sizes"),
    covering(
        {f"zero{stage}": stage for stage in range(4)},
        {f"{ranks} by {tensor}": (ranks, tensor) for ranks, tensor in ((2, 2), (4, 4), (4, 2))},
        together=1,
    ),
)
def test_layers_cut_over_ranks_train_as_one_rank(stage: int, sizes: tuple[int, int], one_rank: Ended) -> None:
    """Four ranks share two heads of keys."""
    ranks, tensor = sizes
    found = on_threads(ranks, tensor, stage=stage)
    expected = [one_rank] if ranks == tensor else on_threads(ranks // tensor, 1, stage=stage)
    for rank, one in enumerate(found):
        assert_close(one, expected[rank // tensor])
        assert one.norms == found[0].norms, "clipping by other factors would part the ranks"
        assert one.losses == found[rank - rank % tensor].losses, "ranks that share layers compute one loss"


#: How state and activations are kept, and sums are sent.
KEPT: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "host optimizer": {"stage": 2, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "all on the host": {
        "stage": 3,
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    },
    "recomputed": RECOMPUTED,
    "partitioned": {"activation_checkpointing": {"policy": "every_block", "partition_activations": True}},
    "overlapped": {"tensor_parallel": {"tp_overlap_comm": True}},
    "overlapped, recomputed": {"tensor_parallel": {"tp_overlap_comm": True}, **RECOMPUTED},
}


@functools.cache
def plain(tensor: int, *, bf16: bool = False) -> list[Ended]:
    """Ranks that share layers, and nothing else."""
    return on_threads(tensor, tensor, bf16={"enabled": bf16})


@pytest.mark.parametrize(("more", "bf16"), covering(KEPT, {"fp32": False, "bf16": True}, together=1))
def test_results_have_the_same_bits_however_state_and_activations_are_kept(more: dict[str, Any], bf16: bool) -> None:
    precision = options(bf16={"enabled": bf16})
    for one, other in zip(on_threads(2, 2, **options(**precision, **more)), plain(2, bf16=bf16), strict=True):
        assert_same(one, other)


def test_overlapped_columns_whose_heads_are_repeated_have_the_same_bits() -> None:
    for one, other in zip(on_threads(4, 4, tensor_parallel={"tp_overlap_comm": True}), plain(4), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("more", "tensor"),
    covering(
        {"plain": {}, **{name: KEPT[name] for name in ("zero3", "recomputed", "overlapped")}},
        {"2 ranks": 2, "4 ranks": 4},
        together=1,
    ),
)
def test_slices_of_the_sequence_change_the_order_of_sums_alone(
    tensor: int, more: dict[str, Any], one_rank: Ended
) -> None:
    section = {"sequence_parallel": True, **more.get("tensor_parallel", {})}
    found = on_threads(tensor, tensor, **options(**{**more, "tensor_parallel": section}))
    for one, other in zip(found, plain(tensor), strict=True):
        assert_close(one, one_rank)
        assert one.losses[:2] == other.losses[:2], "before the first update: forwards have the same bits"


def test_a_sequence_that_does_not_divide_is_refused_with_its_length() -> None:
    def body(engine: Any, data_rank: int) -> None:
        engine(tokens(0, 0, data_rank)[:, : TIME - 1])

    with pytest.raises(ModelError, match=r"sequence, dim -2, does not divide by 2"):
        on_threads(2, 2, body, tensor_parallel={"sequence_parallel": True})


@pytest.mark.parametrize(
    ("more", "tied", "stage"),
    covering(
        {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}, {"apart": False, "tied": True}, {"zero0": 0, "zero3": 3}
    ),
)
def test_the_exact_mode_has_the_bits_of_one_rank(stage: int, tied: bool, more: dict[str, Any]) -> None:
    """Without clipping: norms are sums over blocks of the parts, which round otherwise.

    With lengths that vectors of the processor divide: the elements behind the last whole vector are rounded otherwise.
    """
    given = options(stage=stage, gradient_clipping=0.0, make=lambda: llama(tied=tied, inner=96), **more)
    (expected,) = on_threads(1, 1, **given)
    for one in on_threads(2, 2, tensor_parallel={"exact": True}, **given):
        assert one.losses == expected.losses
        assert one.norms == pytest.approx(expected.norms, rel=1e-6)
        for name, value in expected.weights.items():
            assert torch.equal(one.weights[name], value), name


def test_fp16_scales_the_loss_as_without(one_rank: Ended) -> None:
    fp16 = options(fp16={"enabled": True, "initial_scale_power": 20})
    found, other = on_threads(2, 2, steps=4, **fp16)
    expected = on_threads(1, 1, steps=4, **fp16)[0]
    assert found.losses == other.losses
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)
    assert [norm == float("inf") or norm != norm for norm in found.norms] == [
        norm == float("inf") or norm != norm for norm in expected.norms
    ], "the same steps are skipped"


def sent(ranks: int, **more: Any) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """Calls and bytes over the tensor axis of the second forward, and of its backward."""

    def body(engine: Any, data_rank: int) -> Any:
        traffic = mesh_of(engine).tensor.traffic
        found: list[dict[str, int]] = []
        for step in range(2):  # in the first one, blocks are compared
            before = traffic.since(Traffic())
            loss = engine(tokens(step, 0, data_rank)[:, :-1]).sum()
            forward, between = traffic.since(before), traffic.since(Traffic())
            engine.backward(loss)
            backward = traffic.since(between)
            engine.step()
            found = [dict(one) for one in (forward.calls, forward.bytes, backward.calls, backward.bytes)]
        return tuple(found)

    # At stage 0 gradients are summed in the step; with two data ranks, by groups of their own.
    return on_threads(ranks, 2, body, stage=0, gradient_accumulation_steps=1, **more)[0]


ACTIVATION = MICRO * TIME * 64 * 4


@pytest.mark.parametrize("more", [{}, RECOMPUTED])
def test_a_layer_sends_two_activations_forward_and_two_backward(more: dict[str, Any]) -> None:
    """Bytes as Megatron's formula has them; a recomputed block sums nothing again."""
    more = {**more, "tensor_parallel": {"vocab_parallel_lm_head": False, "partition_config": LAYERS_ALONE}}
    calls, nbytes, calls_back, bytes_back = sent(4, **more)
    assert calls == {"all_reduce": 4}
    assert nbytes == {"all_reduce": 2 * 2 * ACTIVATION}
    assert calls_back == {"all_reduce": 4}
    assert bytes_back == {"all_reduce": 2 * 2 * ACTIVATION}


@pytest.mark.parametrize("more", [{}, RECOMPUTED])
def test_slices_of_the_sequence_send_as_many_bytes(more: dict[str, Any]) -> None:
    """A reduce-scatter and an all-gather for each all-reduce; and an all-gather at either end of the stack.

    A recomputed block sums nothing again, and gathers the slices for its two groups of columns again.
    """
    section = {"sequence_parallel": True, "partition_config": LAYERS_ALONE}
    calls, nbytes, calls_back, bytes_back = sent(4, tensor_parallel=section, **more)
    assert calls == {"all_gather": 4 + 1, "reduce_scatter": 4}
    assert nbytes == {"all_gather": 5 * ACTIVATION, "reduce_scatter": 4 * ACTIVATION}
    again = 2 * 2 if more else 0
    assert calls_back == {"all_gather": 4 + 1 + again, "reduce_scatter": 4}
    assert bytes_back == {"all_gather": (5 + again) * ACTIVATION, "reduce_scatter": 4 * ACTIVATION}


#: The layers of blocks, and neither embedding nor head.
LAYERS_ALONE: dict[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(q|k|v|gate|up)_proj\.(weight|bias)"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)_proj\.(weight|bias)"], "partition_type": "row"},
        {"patterns": [".*"], "partition_type": "skip"},
    ],
}


@pytest.mark.parametrize(
    ("sizes", "stage"),
    covering(
        {f"{ranks} by {tensor}": (ranks, tensor) for ranks, tensor in ((1, 1), (4, 4), (4, 2), (2, 1))},
        {f"zero{stage}": stage for stage in (0, 1, 3)},
        together=1,
    ),
)
def test_what_ranks_that_share_layers_save_any_layout_loads(sizes: tuple[int, int], stage: int, tmp_path: Path) -> None:
    ranks, tensor = sizes

    def save(engine: Any, data_rank: int) -> Ended:
        ended = train(engine, data_rank, range(2))
        assert engine.save_checkpoint(tmp_path, tag="cut")
        return ended

    def load(engine: Any, data_rank: int) -> tuple[Ended, list[float]]:
        path, _ = engine.load_checkpoint(tmp_path, tag="cut")
        assert path is not None
        assert engine.global_steps == 2
        there = Ended(weights=engine.module_state_dict(all_ranks=True))
        return there, train(engine, data_rank, range(2, 3)).losses

    saved = on_threads(2, 2, save, stage=stage)
    stored = sum(file.stat().st_size for file in (tmp_path / "cut").glob("*.safetensors"))
    assert stored < 1.25 * 3 * 4 * sum(param.numel() for param in llama().parameters()), "each element once"
    for found, _ in on_threads(ranks, tensor, load, stage=stage):
        for name, value in saved[0].weights.items():
            assert torch.equal(found.weights[name], value), name


def test_files_of_a_cut_model_are_those_of_the_whole_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def body(engine: Any, data_rank: int) -> dict[str, Tensor]:
        weights = train(engine, data_rank, range(1)).weights
        assert engine.save_16bit_model(tmp_path, "model.safetensors")
        return weights

    found = on_threads(2, 2, body)[0]
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in stored.items()} == {
        name: tuple(value.shape) for name, value in llama().state_dict().items()
    }
    for name, value in found.items():
        assert torch.equal(stored[name], value), name
    llama().load_state_dict(stored)


def test_the_loader_gives_ranks_that_share_layers_the_same_samples() -> None:
    data = [torch.randint(0, VOCAB, (TIME + 1,), generator=torch.Generator().manual_seed(n)) for n in range(32)]

    def body(engine: Any, data_rank: int) -> list[list[int]]:
        loader = engine.deepspeed_io(data)
        return [batch[:, 0].tolist() for batch in loader]

    found = on_threads(4, 2, body)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not {value for row in found[0] for value in map(str, [row])} & {str(row) for row in found[2]}


def test_a_model_that_was_cut_is_not_cut_again() -> None:
    def body(engine: Any, data_rank: int) -> nn.Module:
        return engine.module

    even: Callable[[], nn.Module] = lambda: llama(inner=96)  # noqa: E731 - else their shapes tell ranks apart first
    made = iter(on_threads(2, 2, body, make=even))
    with pytest.raises(ModelError, match="an earlier engine has cut it"):
        on_threads(2, 2, body, make=lambda: next(made))


def test_frozen_weights_that_would_be_cut_are_refused_by_name() -> None:
    def frozen() -> nn.Module:
        model = llama()
        model.layers[0].requires_grad_(False)
        return model

    with pytest.raises(DsrunError, match=r"`layers\.0\.self_attn\.q_proj\.weight` is cut over tensor, and frozen"):
        on_threads(2, 2, make=frozen)


def in_process(stage: int, how: str, dropout: float, more: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """One rank of two that share layers, in a process: generators and `zero.Init` are a process's own."""
    torch.set_num_threads(1)
    config = settings(2, stage=stage, **more)
    torch.manual_seed(11 if how != "other seeds" else 11 + torch.distributed.get_rank())
    if how == "init":
        with dsrun.zero.Init(config_dict_or_path=config):
            model = TinyLlama(dropout=dropout)
    elif how == "meta":
        with torch.device("meta"):
            model = TinyLlama(dropout=dropout)
    else:
        model = TinyLlama(dropout=dropout)
    engine: Any = dsrun.initialize(model=model, config=config)[0]
    try:
        ended = train(engine, 0, range(2))
        return ended.losses, ended.weights
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_built_by_slices_or_on_meta_has_the_same_values(stage: int) -> None:
    expected = run_ranks(2, in_process, stage, "plain", 0.0, {})
    for how in ("init", "meta"):
        for (losses, weights), (losses_of, weights_of) in zip(
            run_ranks(2, in_process, stage, how, 0.0, {}), expected, strict=True
        ):
            assert losses == losses_of, how
            for name, value in weights_of.items():
                assert torch.equal(weights[name], value), (how, name)


@pytest.mark.parametrize("slices", [False, True])
def test_with_dropout_ranks_stay_alike_and_recomputation_draws_the_same(slices: bool) -> None:
    section = {"tensor_parallel": {"sequence_parallel": slices}}
    first, second = run_ranks(2, in_process, 1, "plain", 0.2, section)
    assert first[0] == second[0], "the same loss on both"
    again = run_ranks(2, in_process, 1, "plain", 0.2, {**section, **RECOMPUTED})
    assert again[0][0] == first[0]
    without = run_ranks(2, in_process, 1, "plain", 0.0, section)
    assert without[0][0] != first[0]


def in_stages(ranks: int, stages: int, **more: Any) -> list[list[float]]:
    """Losses and norms of ranks that share layers, in pipeline stages."""

    def body(engine: Any, data_rank: int) -> list[float]:
        batches = (
            (one[:, :-1], one[:, 1:]) for step in range(2) for micro in range(2) for one in [tokens(step, micro, 0)]
        )
        found: list[float] = []
        for _ in range(2):
            found += [float(engine.train_batch(batches, loss_fn=loss_of)), engine.get_global_grad_norm()]
        return found

    def make() -> nn.Module:
        return llama(layers=4)

    return on_threads(ranks, 2, body, make=make, pipeline={"stages": stages}, gradient_reduction="update", **more)


@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_stages_of_cut_layers_have_the_bits_of_one_stage(stage: int) -> None:
    expected = in_stages(2, 1)
    assert in_stages(4, 2, stage=stage) == [*expected, *expected]
