"""Pipe x data x tensor ranks with ZeRO through whole engines, in threads: what equals what, bit for bit.

Stages, chunks, schedules, ZeRO stages, offload and recomputation change no bits; what another number of tensor or data
ranks changes is in the order of sums. What layouts save, and that each loads it: test_layout_checkpoints.py.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dsrun
from dsrun.config.load import inspect, load
from dsrun.errors import ConfigError, ModelError
from dsrun.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from support import layouts, llama
from support.covering import covering
from support.inside_engine import units_of
from support.layouts import (
    BLOCKS,
    LAYOUTS,
    MICROS,
    Layout,
    Trained,
    counting_llama,
    micro_batches,
    on_layout,
    train,
    trained_with_seeds,
    whole_weights,
)
from support.models import loss_of
from support.ranks import run_ranks

RECOMPUTED: dict[str, Any] = {"activation_checkpointing": {"policy": "every_block"}}
PARTITIONED: dict[str, Any] = {"activation_checkpointing": {"policy": "every_block", "partition_activations": True}}
OPTIMIZER_ON_HOST: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
ALL_ON_HOST: dict[str, Any] = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
#: Cuts the vocabulary as well, in the embedding and in the output layer.
VOCABULARY_CUT: dict[str, Any] = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.(q|k|v|gate|up)_proj\.(weight|bias)"], "partition_type": "column"},
                {"patterns": [r".*\.(o|down)_proj\.(weight|bias)"], "partition_type": "row"},
                {"patterns": [r"embed_tokens\.weight"], "partition_type": "row"},
                {"patterns": [r"lm_head\.weight"], "partition_type": "column", "gather_output": True},
                {"patterns": [".*"], "partition_type": "skip"},
            ],
        },
    }
}
#: Names the output layer alone; an embedding with the same weight is cut with it.
HEAD_CUT = copy.deepcopy(VOCABULARY_CUT)
del HEAD_CUT["tensor_parallel"]["partition_config"]["layer_specs"][2]


@dataclass(frozen=True)
class Ended:
    """What all ranks of a layout have computed alike.

    Attributes:
        trained: losses and norms.
        weights: whole parameters by name.
        scales: loss scale after each update.
        skipped: updates that were left out.
    """

    trained: Trained
    weights: dict[str, Tensor]
    scales: list[float]
    skipped: int


def run(layout: Layout, *, tied: bool = False, updates: int = 2, make: Callable[[], nn.Module] | None = None) -> Ended:
    """Trains, and asserts that all ranks have computed the same."""

    def body(engine: Any) -> Ended:
        trained, scales = Trained(), []
        for number in range(updates):
            one = train(engine, layout, range(number, number + 1))
            trained.losses += one.losses
            trained.norms += one.norms
            scales.append(engine.cur_scale)
        weights = {name: value for name, value in whole_weights(engine).items() if not name.endswith(".seen")}
        return Ended(trained, weights, scales, engine.skipped_steps)

    first, *others = on_layout(layout, body, make or partial(counting_llama, tied=tied))
    for other in others:
        assert_same(other, first)
    return first


@functools.cache
def _reference(layout: Layout, tied: bool) -> Ended:
    assert not layout.more, "further keys are no part of a layout's hash"
    return run(layout, tied=tied)


PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


@functools.cache
def _in_precision(layout: Layout, precision: str) -> Ended:
    return run(layout.having(**PRECISIONS[precision]))


def assert_same(found: Ended, expected: Ended) -> None:
    # By their texts: norms of a step that overflows are no numbers.
    assert str(found.trained) == str(expected.trained)
    assert (found.scales, found.skipped) == (expected.scales, expected.skipped)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name


P2T2 = Layout(pipe=2, tensor=2)
TURNS = Layout(pipe=2, tensor=2, virtual=2, schedule="breadth_first")


#: Layouts of cut layers in stages, by their names.
IN_STAGES = {
    str(layout): layout
    for layout in (
        *(replace(P2T2, stage=stage) for stage in range(4)),
        *(replace(TURNS, stage=stage) for stage in (1, 0, 3, 2)),  # so that the two have slices at other stages
        Layout(pipe=2, tensor=2, schedule="gpipe", stage=1),
        Layout(pipe=2, tensor=2, virtual=2, schedule="interleaved", stage=2),
        Layout(pipe=2, tensor=2, virtual=2, schedule="zbv", stage=1),
        Layout(pipe=2, tensor=2, schedule="zero_bubble", stage=3),
    )
}


@pytest.mark.parametrize(("layout", "slices"), covering(IN_STAGES, {"whole": False, "slices": True}, together=1))
def test_stages_of_cut_layers_have_the_bits_of_one_stage(layout: Layout, slices: bool) -> None:
    """Clipping is active, and the embedding is tied to the head of the other stage."""
    expected = _reference(Layout(tensor=2, slices=slices), True)
    assert min(expected.trained.norms) > layout.config()["gradient_clipping"]
    assert_same(run(replace(layout, slices=slices), tied=True), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_of_data_and_tensor_ranks_have_the_bits_of_stage_0(stage: int) -> None:
    assert_same(run(Layout(data=2, tensor=2, stage=stage)), _reference(Layout(data=2, tensor=2), False))


#: How state and activations are kept, each with a ZeRO stage.
KEPT: dict[str, tuple[int, dict[str, Any]]] = {
    "host optimizer": (2, OPTIMIZER_ON_HOST),
    "all on the host": (3, ALL_ON_HOST),
    "recomputed": (1, RECOMPUTED),
    "partitioned": (1, PARTITIONED),
    "all of it": (3, {**PARTITIONED, **ALL_ON_HOST}),
}


@pytest.mark.parametrize(
    ("kept", "base", "precision"),
    covering(KEPT, {"p2t2": P2T2, "d2t2": Layout(data=2, tensor=2)}, {name: name for name in PRECISIONS}, together=1),
)
def test_how_state_and_activations_are_kept_changes_no_bits(
    kept: tuple[int, dict[str, Any]], base: Layout, precision: str
) -> None:
    stage, more = kept
    turns = base.pipe > 1 and "offload_param" in more.get("zero_optimization", {})
    layout = replace(TURNS if turns else base, stage=stage).having(**PRECISIONS[precision], **more)
    assert_same(run(layout), _in_precision(base, precision))


@functools.cache
def _with_overflows(layout: Layout) -> Ended:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 23, "hysteresis": 1, "loss_scale_window": 2}}
    return run(layout.having(**fp16), updates=5)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak("ZeRO 3, and bf16 at ZeRO 0")), 3])
def test_fp16_overflows_in_the_same_updates_in_any_stages(stage: int) -> None:
    expected = _with_overflows(Layout(tensor=2))
    assert 0 < expected.skipped < 5
    assert_same(_with_overflows(replace(TURNS, stage=stage)), expected)


NAMED = {"both named": VOCABULARY_CUT, "head named": HEAD_CUT}


@functools.cache
def _with_vocabulary_cut(named: str) -> Ended:
    return run(Layout(tensor=2).having(**NAMED[named]), tied=True)


@pytest.mark.parametrize(
    ("layout", "named"),
    covering(
        {
            str(layout): layout
            for layout in (P2T2, replace(TURNS, stage=3), Layout(pipe=2, tensor=2, virtual=2, schedule="zbv"))
        },
        {name: name for name in NAMED},
        together=1,
    ),
)
def test_a_tied_vocabulary_that_is_cut_over_tensor_is_one_weight_in_all_stages(layout: Layout, named: str) -> None:
    """Each stage sees one of the two uses alone: they are cut alike, and their gradients summed."""
    expected = _with_vocabulary_cut(named)
    assert_same(run(layout.having(**NAMED[named]), tied=True), expected)
    one_rank = _reference(Layout(), True).trained
    assert expected.trained.norms == pytest.approx(one_rank.norms, rel=1e-6)
    assert expected.trained.losses == pytest.approx(one_rank.losses, rel=1e-6)


def test_a_tied_vocabulary_that_is_cut_lies_in_one_unit_of_the_stages_that_use_it() -> None:
    def shared(engine: Any) -> list[tuple[tuple[str, ...], tuple[int, ...], int]]:
        return [
            (unit.placement.cut_over, unit.placement.stages, unit.replicas.size)
            for unit in units_of(engine)
            if unit.layout.extents[0].name == "embed_tokens.weight"
        ]

    found = on_layout(P2T2.having(**VOCABULARY_CUT), shared, partial(counting_llama, tied=True))
    assert found == [[(("tensor",), (0, 1), 2)]] * 4


def test_what_one_stage_cannot_cut_is_told_on_all_ranks() -> None:
    """The head, which the last stage alone has, is too short for the ranks."""

    def make() -> nn.Module:
        model = counting_llama()
        model.lm_head = nn.Linear(32, 1, bias=False)
        return model

    models = [make() for _ in range(4)]

    def rank(collectives: Any) -> str:
        with pytest.raises(ModelError) as refused:
            dsrun.initialize(model=models[collectives.rank], config=P2T2.having(**VOCABULARY_CUT).config())
        return str(refused.value)

    with layouts.ranks_of_threads(torch.device("cpu")) as threads:
        first, *others = layouts.LoopbackWorld(4).run(lambda collectives: threads(collectives, rank))
    assert "`lm_head.weight` (Linear) has 1 along dim 0, too few for 2 ranks" in first
    assert others == [first] * 3


def test_a_call_after_one_that_failed_finds_its_own_plan() -> None:
    """The first one plans whole vocabularies, and fails when it cuts the stages."""
    models = [counting_llama() for _ in range(4)]
    failing = P2T2.having(pipeline={"stages": 2, "partition": [0, 1, BLOCKS + 1]})
    second = Layout(data=2, tensor=2).having(pipeline={"stages": "auto"}, **VOCABULARY_CUT)

    def rank(collectives: Any) -> int:
        model = models[collectives.rank]
        with pytest.raises(ConfigError, match="expected 0 to 4, all layers"):
            dsrun.initialize(model=model, config=failing.config())
        engine: Any = dsrun.initialize(model=model, config=second.config())[0]
        rows = engine.module.lm_head.weight.shape[0]
        engine.destroy()
        return rows

    with layouts.ranks_of_threads(torch.device("cpu")) as threads:
        rows = layouts.LoopbackWorld(4).run(lambda collectives: threads(collectives, rank))
    assert rows[0] + rows[1] == llama.VOCAB
    assert rows[2:] == rows[:2]


def permutation(scale: float) -> nn.Linear:
    """Returns a Linear that permutes, with signs and a power of two."""
    linear = nn.Linear(16, 16)
    signs = torch.randint(0, 2, (16,)) * 2.0 - 1
    linear.weight.data.copy_(torch.diag(scale * signs)[torch.randperm(16)])
    nn.init.zeros_(linear.bias)
    return linear


class ExactMlp(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up_proj, self.down_proj = permutation(scale), permutation(1.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x_BTD))


class ExactBlock(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.mlp = ExactMlp(scale)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.mlp(x_BTD)


class Exact(nn.Module):
    """A model whose gradients have no rounding in any layout: few products of powers of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = nn.Embedding(llama.VOCAB, 16)
        self.layers = nn.ModuleList(ExactBlock(2.0 ** (6 if number % 3 else -12)) for number in range(BLOCKS))
        self.lm_head = nn.Linear(16, llama.VOCAB, bias=False)
        for weight in (self.embed_tokens.weight, self.lm_head.weight):
            weight.data.copy_(torch.randint(-1, 2, weight.shape))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.lm_head(x_BTD)


def exact_loss(logits_BTV: Tensor, classes_BT: Tensor) -> Tensor:
    """Returns the mean of 16 numbers; each has a gradient of 1/16."""
    return logits_BTV.gather(-1, classes_BT.unsqueeze(-1)).mean()


#: How far a norm may lie from that of the gradients, relative to it; see tests/runtime/engine/test_tensor_norm.py.
#:
#: In a block of 256 elements fp32 rounds each square, and at most 255 sums of what is not negative: 256 roundings of
#: the sum, of which the root halves the effect, and is rounded itself. All else is fp64. So 2^-45 is out of reach of
#: any block whose squares are not exact in fp32, and of any root that is not: that is one rounding, 2^-24.
NORM_BOUND = 130 * 2.0**-24


@functools.cache
def exact_norm() -> float:
    """The norm of one process in fp64, of all elements."""
    model = Exact().double()
    for inputs, classes in islice(micro_batches(Layout(), 0), MICROS):
        (exact_loss(model(inputs), classes) / MICROS).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return math.sqrt(math.fsum(value**2 for grad in grads for value in grad.view(-1).tolist()))


#: With two of the three axes.
ON_TWO_AXES = [one for one in LAYOUTS if sum(size > 1 for size in (one.data, one.tensor, one.pipe)) > 1]
OF_ONE_AXIS = pytest.mark.soak("test_tensor_norm.py and test_pipeline_precision.py have each axis alone")


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(one, marks=() if one in ON_TWO_AXES else OF_ONE_AXIS) for one in LAYOUTS),
        pytest.param(Layout(data=2, pipe=2), marks=pytest.mark.soak("the same with ZeRO 2 and 3")),
        pytest.param(Layout(data=2, tensor=2), marks=pytest.mark.soak("the same with ZeRO 3")),
    ],
    ids=str,
)
def test_the_norm_has_the_same_bits_on_all_ranks_and_is_that_of_one_process(layout: Layout) -> None:
    def norm_of(engine: Any) -> float:
        engine.train_batch(micro_batches(layout, layout.data_rank(engine.global_rank)), loss_fn=exact_loss)
        return engine.get_global_grad_norm()

    norms = on_layout(layout, norm_of, Exact)
    assert len(set(norms)) == 1, norms
    assert abs(norms[0] - exact_norm()) <= NORM_BOUND * exact_norm(), f"{layout}: {norms[0]} for {exact_norm()}"


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(llama.VOCAB, 32)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.embedding(tokens_BT)


def logits(module: Tokens, x_BTD: Tensor) -> Tensor:
    return x_BTD @ module.embedding.weight.T


def _list_of_layers(layout: Layout, config: dict[str, Any], body: Callable[[Any], Any]) -> list[Any]:
    """Runs engines of a list of layers, whose first and last one are tied."""

    def made(rank: int) -> nn.Module:
        torch.manual_seed(11)
        specs = [
            TiedLayerSpec("tokens", Tokens, tied_weight_attr=["embedding.weight"]),
            *(LayerSpec(llama.Layer, 32, 4, 2, 51, bias=True, dropout=0.0) for _ in range(BLOCKS)),
            LayerSpec(nn.LayerNorm, 32),
            TiedLayerSpec("tokens", Tokens, forward_fn=logits, tied_weight_attr=["embedding.weight"]),
        ]
        return PipelineModule(specs, num_stages=layout.pipe, loss_fn=loss_of, job=JobRank(rank, layout.ranks))

    models = [made(rank) for rank in range(layout.ranks)]

    def rank(collectives: Any) -> Any:
        settings = {**layout.config(), "pipeline": {"stages": "auto"}, **config}
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=settings)[0]
        try:
            return body(engine)
        finally:
            engine.destroy()

    with layouts.ranks_of_threads(torch.device("cpu")) as threads:
        return layouts.LoopbackWorld(layout.ranks).run(lambda collectives: threads(collectives, rank))


def _losses(layout: Layout) -> Callable[[Any], list[float]]:
    def body(engine: Any) -> list[float]:
        batches = micro_batches(layout, layout.data_rank(engine.global_rank))
        return [float(engine.train_batch(batches)) for _ in range(2)]

    return body


def test_a_list_of_layers_is_cut_over_tensor_in_its_stages() -> None:
    whole = _list_of_layers(Layout(pipe=2), {}, _losses(Layout(pipe=2)))
    one, two = (_list_of_layers(layout, {}, _losses(layout)) for layout in (Layout(tensor=2), P2T2))
    assert two == [one[0]] * 4
    assert one[0] == pytest.approx(whole[0], rel=1e-6)


def test_uses_of_a_layer_that_are_not_cut_alike_are_refused_by_name() -> None:
    rules = [
        {"patterns": [r".*\.(q|k|v|gate|up)_proj\.(weight|bias)"], "partition_type": "column"},
        {"patterns": [r".*\.(o|down)_proj\.(weight|bias)"], "partition_type": "row"},
        {"patterns": [r"tied_modules.*"], "partition_type": "row"},
        {"patterns": [".*"], "partition_type": "skip"},
    ]
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": rules}}
    for layout, said in ((P2T2, "the ranks of stages 0 and 1 do not agree"), (Layout(tensor=2), "is not cut alike")):
        with pytest.raises(ModelError, match=said) as refused:
            _list_of_layers(layout, {"tensor_parallel": section}, lambda engine: None)
        assert "tied_modules.tokens.embedding.weight" in str(refused.value)


@pytest.mark.parametrize("is_list", [False, True], ids=["model", "list"])
def test_the_grid_knows_ranks_that_share_layers(is_list: bool) -> None:
    layout = replace(P2T2, stage=1)

    def ask(engine: Any) -> dict[str, Any]:
        grid = engine.module.mpu() if is_list else engine.grid
        assert grid is engine.grid
        assert not is_list or grid.topology() is engine.module.topology()
        return {
            "place": (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()),
            "sizes": (grid.pipe_parallel_size, grid.data_parallel_size, grid.get_slice_parallel_world_size()),
            "tensor": (grid.get_tensor_model_parallel_rank(), engine.get_tensor_parallel_rank(), engine.mp_world_size),
            "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
            "engine's model": engine.get_model_parallel_rank(),
            "ranks": (grid.slice_group, grid.pp_group, grid.dp_group),
            "data": (engine.get_data_parallel_rank(), engine.dp_world_size),
            "axes": grid.topology().get_axis_names(),
            "samples": engine.train_batch_size(),
        }

    for rank, found in enumerate(_list_of_layers(layout, {}, ask) if is_list else on_layout(layout, ask)):
        stage, tensor = divmod(rank, 2)
        assert found == {
            "place": (stage, 0, tensor),
            "sizes": (2, 1, 2),
            "tensor": (tensor, tensor, 2),
            "model": (rank, 4),
            "engine's model": tensor,
            "ranks": ([2 * stage, 2 * stage + 1], [tensor, 2 + tensor], [rank]),
            "data": (0, 1),
            "axes": ["pipe", "data", "model"],
            "samples": 2 * MICROS,
        }


@pytest.mark.parametrize(
    ("more", "layout", "tied"),
    covering(
        {"whole vocabulary": {}, "cut vocabulary": VOCABULARY_CUT},
        {str(layout): layout for layout in (P2T2, replace(TURNS, stage=3))},
        {"apart": False, "tied": True},
    ),
)
def test_files_for_other_programs_have_the_whole_model(
    layout: Layout, tied: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    tokens_BT, _ = next(micro_batches(Layout(), 0))
    layout = layout.having(**more)

    def body(engine: Any) -> tuple[Any, Any, float]:
        train(engine, layout, range(1))
        engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.save_16bit_model(tmp_path, "model.bin")
        loss = engine.eval_batch(micro_batches(layout, 0), loss_fn=loss_of)
        return engine.module_state_dict(), whole_weights(engine), float(loss)

    found = on_layout(layout, body, partial(counting_llama, tied=tied))
    model = counting_llama(tied=tied)
    names = set(model.state_dict())
    files = {
        "module_state_dict": found[0][0],
        **{f"all ranks, rank {rank}": everywhere for rank, (_, everywhere, _) in enumerate(found)},
        "torch": torch.load(tmp_path / "model.bin", weights_only=True),
        "safetensors": load_file(tmp_path / "model.safetensors"),
    }
    assert [weights for weights, _, _ in found[1:]] == [None] * 3
    logits: list[Tensor] = []
    for source, weights in files.items():
        missing = names - set(weights)
        # A file of safetensors may have tied weights once.
        assert missing in (set(), {"lm_head.weight"} if tied and source == "safetensors" else set()), source
        model.load_state_dict(weights, strict=not missing)
        logits.append(model.eval()(tokens_BT))
        assert torch.equal(logits[-1], logits[0]), source
    with torch.no_grad():
        losses = [float(loss_of(model(x), y)) for x, y in islice(micro_batches(Layout(), 0), MICROS)]
    assert found[0][2] == pytest.approx(sum(losses) / MICROS, rel=1e-6)


def test_one_batch_that_fits_no_three_axes_is_told_with_the_arithmetic() -> None:
    three = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "gradient_accumulation_steps": 4}
    batch = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(ConfigError) as refused:
        load({**batch, **three}, world_size=16)
    assert refused.value.render() == (
        "error: <dict>: `train_batch_size` 30 != micro batch 2 x accumulation 4 x data-parallel size 4 (32); "
        "data-parallel size is 16 ranks / pipeline 2 x tensor parallel 2\n"
        "hint: nearest that fits: `train_batch_size` 32 = micro batch 2 x accumulation 4 x data-parallel size 4"
    )
    with pytest.raises(ConfigError) as refused:
        load({**batch, **three}, world_size=6)
    assert refused.value.render() == (
        "error: <dict>: `pipeline.stages` is 2 and `tensor_parallel.autotp_size` is 2; "
        "6 ranks do not divide by pipeline 2 x tensor parallel 2\n"
        "hint: use a multiple of 4 ranks, or sizes whose product divides 6"
    )


def test_parameters_that_every_micro_batch_gathers_are_refused_with_what_a_rank_would_move() -> None:
    """4 micro batches x 3 x 4 bytes / (2 stages x 2 tensor ranks); chunks in turns: 2 x 4 and fp32 sums."""
    config = replace(P2T2, stage=3)
    said = "M x 3 x 4N/4 bytes a rank and update, of N parameters and M micro batches: 12 bytes a parameter, where "
    (held,) = [one for one in inspect(config.config(), world_size=4).findings if one.key == "zero_optimization.stage"]
    assert held.message.endswith(f"{said}chunks that take turns move 3")
    with pytest.raises(ConfigError, match=r"12 bytes a parameter, where chunks that take turns move 3"):
        on_layout(config.having(zero_optimization={"offload_param": {"device": "cpu"}}), lambda engine: None)


def _draw(*_: Any) -> None:
    random.random()


def _drawing(layout: Layout, how: str) -> Trained:
    on_meta, chance = how == "meta", 0.2 if how == "dropout" else 0.0
    with torch.device("meta" if on_meta else "cpu"):  # a buffer on it has no values
        model = llama.llama(layers=BLOCKS, tied=True) if on_meta else counting_llama(dropout=chance, tied=True)
    # Stages set the seeds of layers, and of what is drawn on the meta device, by the first rank's. What else a forward
    # draws (the last stage's is run to its end) they do not compare.
    seed = 13 + (int(os.environ["RANK"]) if layout.pipe > 1 else 0)
    torch.manual_seed(seed)
    random.seed(seed)
    model.layers[-1].register_forward_pre_hook(_draw)
    return trained_with_seeds(model, layout)


@pytest.mark.parametrize("how", ["dropout", "meta"])
def test_what_is_drawn_is_the_same_in_any_stages_of_cut_layers(how: str) -> None:
    one = run_ranks(2, _drawing, Layout(tensor=2), how)
    found = run_ranks(4, _drawing, replace(P2T2, stage=1), how)
    assert found == [one[0]] * 4
    assert one[0] == one[1]
