"""Whole weights of models whose parameters are cut over ranks, in and out: dicts, files, checkpoints; at every stage.

The axis that cuts them is a draft; see `test_second_axis.py`. No step is taken: what layers compute, others test.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dsrun
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.convert.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.styles import Deal, boxes
from dsrun.runtime.zero.access import over_axes
from support.cli import invoke
from support.inside_engine import mesh_of
from support.pipelines import Model as Staged
from support.threaded_ranks import ranks_of_threads

CPU = torch.device("cpu")
_AXES = importlib.import_module("dsrun.config.axes")
_ROOT = importlib.import_module("dsrun.runtime.engine.initialize")
#: The dim along which a parameter is cut, and how its length is dealt, by the end of its name. Lengths are uneven.
DEALS: dict[str, tuple[int, Deal]] = {
    "column.weight": (0, Deal()),
    "column.bias": (0, Deal()),
    "row.weight": (1, Deal()),
    "packed.weight": (0, Deal(2)),
    "packed_row.weight": (1, Deal(2)),
    "embedding.weight": (0, Deal()),
    "gate_up": (1, Deal(2)),
    "up.weight": (0, Deal()),
    "up.bias": (0, Deal()),
    "down.weight": (1, Deal()),
}
#: Stages, ranks, and how many of these cut parameters: each stage and each size by default.
SOME = [(0, 2, 2), (1, 4, 2), (2, 3, 3), (3, 4, 2)]
PLACES = pytest.mark.parametrize(
    ("stage", "size", "width"),
    [
        *SOME,
        *(
            pytest.param(stage, *size, marks=pytest.mark.soak("each stage with one size, and each size"))
            for stage in range(4)
            for size in ((2, 2), (4, 2), (3, 3))
            if (stage, *size) not in SOME
        ),
    ],
)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Mixed(nn.Module):
    """Every way in which a parameter may be cut, two names for one of them, a frozen one and a buffer."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 8)
        self.column = nn.Linear(8, 7)
        self.row = nn.Linear(7, 8)
        self.packed = nn.Linear(8, 14, bias=False)
        self.packed_row = nn.Linear(14, 8, bias=False)
        self.gate_up = nn.Parameter(torch.randn(2, 14, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("counts", torch.arange(4))

    def forward(self, x_BN: Tensor) -> Tensor:
        return x_BN


def cut(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    """Leaves this rank its parts."""
    del settings, say
    axis = mesh.tensor
    cuts: dict[int, CutParameter] = {}
    for name, param in model.named_parameters():
        found = [deal for end, deal in DEALS.items() if name == end or name.endswith(f".{end}")]
        if not found or not param.numel():
            continue
        ((dim, deal),) = found
        runs = deal.runs(param.shape[dim], rank=axis.rank, size=axis.size)
        cuts[id(param)] = CutParameter(RankPlacement(cut_over=("second",)), boxes(tuple(param.shape), dim, runs))
        param.data = torch.cat([param.detach().narrow(dim, a, b - a) for a, b in runs], dim).contiguous()
    return cuts


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the axis that cuts parameters as wide as asked; its ranks are neighbours."""

    def widen(width: int) -> None:
        row = AxisRow("second", "second axis", lambda config: width, ("replica", "tensor"), cuts=True)
        monkeypatch.setattr(_AXES, "AXES", (*AXES, row))
        monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (cut,) if width > 1 else ())

    return widen


def run(
    stage: int,
    body: Callable[[Any, int], Any],
    *,
    size: int,
    make: Callable[[], nn.Module] = Mixed,
    **settings: Any,
) -> list[Any]:
    """Runs `body` with the engine of each rank."""
    models = [make() for _ in range(size)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **settings,
    }

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=config)[0]
        try:
            return body(engine, collectives.rank)
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as go:
        return LoopbackWorld(size).run(lambda collectives: go(collectives, rank))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], *, dtype: torch.dtype | None = None) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        wanted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


@PLACES
def test_a_state_dict_has_whole_tensors_on_the_ranks_that_ask(
    second: Callable[[int], None], stage: int, size: int, width: int
) -> None:
    second(width)
    expected = Mixed().state_dict()

    def body(engine: Any, rank: int) -> dict[str, Tensor] | None:
        everywhere = engine.module_state_dict(all_ranks=True)
        assert_equal(everywhere, expected)
        trained = engine.module_state_dict(exclude_frozen_parameters=True, all_ranks=True)
        assert_equal(trained, {name: value for name, value in expected.items() if name != "frozen"})
        return engine.module_state_dict()

    found = run(stage, body, size=size)
    assert_equal(found[0], expected)
    assert found[1:] == [None] * (size - 1)


@pytest.mark.parametrize(
    "swapped", [False, pytest.param(True, marks=pytest.mark.soak("each place with one of two dtypes"))]
)
@PLACES
def test_files_for_other_programs_have_whole_tensors(
    second: Callable[[int], None], tmp_path: Path, *, stage: int, size: int, width: int, swapped: bool
) -> None:
    second(width)
    dtype = torch.float32 if (stage // 2 % 2 == 0) != swapped else torch.bfloat16

    def body(engine: Any, rank: int) -> None:
        engine.save_16bit_model(tmp_path, "model.bin")
        engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.save_16bit_model(tmp_path / "shards", "model.safetensors", max_shard_bytes=600)

    run(stage, body, size=size, bf16={"enabled": dtype == torch.bfloat16})
    expected = dict(Mixed().state_dict())
    assert_equal(torch.load(tmp_path / "model.bin"), expected, dtype=dtype)
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    in_shards = {name: value for file in shards for name, value in load_file(file).items()}
    for found in (load_file(tmp_path / "model.safetensors"), in_shards):
        assert_equal(dict(sorted(found.items())), dict(sorted(expected.items())), dtype=dtype)


@PLACES
def test_of_a_whole_dict_each_rank_takes_its_parts(
    second: Callable[[int], None], stage: int, size: int, width: int
) -> None:
    second(width)
    other = Mixed(seed=11).state_dict()

    def body(engine: Any, rank: int) -> dict[str, Tensor]:
        # Masters stand in fp32 for what a 16-bit model reads.
        engine.load_module_state_dict(other)
        master = dsrun.utils.safe_get_full_fp32_param(engine.module.row.weight)
        assert master is not None
        ((start, stop),) = Deal().runs(7, rank=rank % width, size=width)
        assert torch.equal(master, other["row.weight"][:, start:stop])
        return engine.module_state_dict(all_ranks=True)

    for found in run(stage, body, size=size, bf16={"enabled": True}):
        assert_equal(found, other, dtype=torch.bfloat16)


@STAGES
def test_files_are_loaded_into_the_parts_of_an_engine(
    second: Callable[[int], None], tmp_path: Path, stage: int
) -> None:
    second(2)
    other = Mixed(seed=11).state_dict()
    save_file({name: value.clone() for name, value in other.items()}, tmp_path / "model.safetensors")

    def body(engine: Any, rank: int) -> dict[str, Tensor]:
        dsrun.zero.load_pretrained(engine.module, tmp_path)
        return engine.module_state_dict(all_ranks=True)

    for found in run(stage, body, size=4):
        assert_equal(found, other)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_dict_of_torchs_has_parts_and_says_so_once(
    second: Callable[[int], None], caplog: pytest.LogCaptureFixture, stage: int
) -> None:
    second(2)

    def body(engine: Any, rank: int) -> tuple[int, ...]:
        engine.module_state_dict()
        engine.module.norm.state_dict()
        engine.module.state_dict()
        return tuple(engine.module.state_dict()["row.weight"].shape)

    assert run(stage, body, size=2) == [(8, 4), (8, 3)]
    said = [record.getMessage() for record in caplog.records if "state_dict" in record.getMessage()]
    assert len(said) == 2, "once an engine, and both ranks are threads of one process"
    assert "part of `embedding.weight`, and of all else that is cut over second" in said[0] + said[1]
    assert "engine.module_state_dict() has whole tensors" in said[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_dict_of_parts_is_no_dict_of_the_model(second: Callable[[int], None], stage: int) -> None:
    """Such as torch's own `state_dict` of a rank's module has."""
    second(2)

    def body(engine: Any, rank: int) -> dict[str, Tensor]:
        with dsrun.zero.GatheredParameters(engine.module.parameters()):
            parts = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"`row.weight` has shape \(8, \d\); the model's has \(8, 7\)"):
            engine.load_module_state_dict(parts)
        return engine.module_state_dict(all_ranks=True)

    for found in run(stage, body, size=2):
        assert_equal(found, Mixed().state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_only_ranks_with_parts_for_one_that_asks_move_any(second: Callable[[int], None], stage: int) -> None:
    """One all-gather a parameter along the axis, of as much as the longest part has on each rank."""
    second(2)

    def body(engine: Any, rank: int) -> tuple[int, int]:
        engine.module_state_dict()  # ranks tell each other their boxes
        axis = mesh_of(engine).tensor
        before = axis.traffic.since(type(axis.traffic)())
        engine.module_state_dict()
        moved = axis.traffic.since(before)
        return moved.calls.total(), moved.bytes["all_gather"]

    # Longest parts: of 13, 7 and 7 rows or columns; packed ones are 2 x 4 of 14.
    numels = [7 * 8, 4 * 8, 4, 8 * 4, 8 * 8, 8 * 8, 2 * 8 * 8]
    asked = (len(numels), 2 * 4 * sum(numels))
    assert run(stage, body, size=4) == [asked, asked, (0, 0), (0, 0)]


@pytest.mark.parametrize("stage", [0, 3])
def test_one_parameter_at_a_time_is_whole_on_the_device(
    second: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: int
) -> None:
    """See [Note: one unit at a time]: those before it are gone when the next one is put together."""
    second(2)
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []
    put_together = over_axes.joined

    def watched(*args: Any, **options: Any) -> Tensor:
        most.append(sum(one() is not None for one in alive))
        whole = put_together(*args, **options)
        alive.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(over_axes, "joined", watched)

    def body(engine: Any, rank: int) -> None:
        engine.save_16bit_model(tmp_path, "model.safetensors")
        engine.module_state_dict(all_ranks=True)

    run(stage, body, size=2)
    assert len(most) == 2 * 2 * 7, "two ranks, two calls, seven parameters"
    assert max(most) <= 2, "on each of two ranks the one before, until the loop goes on"


@PLACES
def test_checkpoints_of_parts_export_whole_tensors(
    second: Callable[[int], None], tmp_path: Path, stage: int, size: int, width: int
) -> None:
    second(width)

    def body(engine: Any, rank: int) -> None:
        assert engine.save_checkpoint(tmp_path, tag="cut")

    run(stage, body, size=size, bf16={"enabled": True})
    export = invoke("checkpoint", "export", "--dtype", "fp32", str(tmp_path), str(tmp_path / "exported"))
    assert export.exit_code == 0, export.stderr
    expected = Mixed().state_dict()
    expected["frozen"] = expected["frozen"].bfloat16().float()
    for found in (
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "cut"),
        load_file(tmp_path / "exported" / "model.safetensors"),
    ):
        for name in {*expected} - {"head.weight"}:
            assert torch.equal(torch.as_tensor(found[name]), expected[name]), name

    # And what one rank loads is what all had together.
    second(1)

    def load(engine: Any, rank: int) -> dict[str, Tensor]:
        path, _ = engine.load_checkpoint(tmp_path, tag="cut")
        assert path is not None
        return engine.module_state_dict(all_ranks=True)

    for found in run(3 - stage, load, size=1):
        assert_equal(found, expected)


@STAGES
def test_stages_of_a_cut_model_come_together(second: Callable[[int], None], tmp_path: Path, stage: int) -> None:
    """First the parts of each stage, then the stages."""
    second(2)

    def make() -> nn.Module:
        torch.manual_seed(3)
        return Staged(tied=False, dropout=0.0, layers=4)

    expected = make().state_dict()

    def body(engine: Any, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        engine.save_16bit_model(tmp_path, "model.safetensors")
        before = engine.module_state_dict()
        engine.load_module_state_dict({name: -value for name, value in expected.items()})
        return engine.module_state_dict(all_ranks=True), before

    found = run(stage, body, size=4, make=make, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    assert_equal(found[0][1] or {}, expected)
    assert_equal(dict(sorted(load_file(tmp_path / "model.safetensors").items())), dict(sorted(expected.items())))
    for after, _ in found:
        assert_equal(after, {name: -value for name, value in expected.items()})


@pytest.mark.parametrize(
    ("stage", "size", "tied"),
    [
        (0, 2, True),
        (1, 4, False),
        (3, 4, True),
        *(
            pytest.param(*case, marks=pytest.mark.soak("each stage with tied weights or without"))
            for case in ((0, 2, False), (1, 4, True), (3, 4, False))
        ),
    ],
)
def test_a_model_of_hugging_face_comes_out_as_it_went_in(tmp_path: Path, *, stage: int, size: int, tied: bool) -> None:
    """Cut by its own plan: a file for transformers, and a dict of transformers', with tied weights and without."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 3) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 46, "vocab_size": 61, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))

    before, other = make().state_dict(), make(seed=11).state_dict()

    def body(engine: Any, rank: int) -> dict[str, Tensor]:
        engine.save_16bit_model(tmp_path, "model.safetensors")
        assert_equal(engine.module_state_dict(all_ranks=True), before)
        engine.load_module_state_dict(other)
        return engine.module_state_dict(all_ranks=True)

    for found in run(stage, body, size=size, make=make, tensor_parallel={"autotp_size": 2}):
        assert_equal(found, other)
    make().config.save_pretrained(tmp_path)
    assert_equal(LlamaForCausalLM.from_pretrained(tmp_path).state_dict(), before)
