"""Engines whose ranks have other parameters, stage by stage along a pipe axis: what all of it, or a stage, agrees on.

No schedule runs here: each stage has a loss of its own, of which the whole model's is the sum. So everything that these
tests compare has an oracle in one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import CheckpointError, DsrunError, ModelError
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.threaded_ranks import ranks_of_threads

CPU = torch.device("cpu")
_AXES = importlib.import_module("dsrun.config.axes")
_ROOT = importlib.import_module("dsrun.runtime.engine.initialize")
_ENGINE = importlib.import_module("dsrun.runtime.engine.engine")
WIDTH, MICRO, STEPS = 160, 2, 2
PARTS = ("first", "last")


class Part(nn.Module):
    """A layer, a small weight beside it, and a buffer that counts forwards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_BH: Tensor) -> Tensor:
        """A loss of these inputs."""
        self.seen += 1
        return (self.layer(x_BH) - 1).square().mean()


class Model(nn.Module):
    """Some of the parts of a model, and the weight that is tied over all of them, if it is."""

    def __init__(self, names: tuple[str, ...], *, tied: bool = False) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Part(PARTS.index(name)))
        self.names = names
        self.ties = [f"tie_of_{name}" for name in names] if tied else []
        for number, name in enumerate(self.ties):
            weight = nn.Parameter(torch.linspace(-1, 1, 300)) if number == 0 else getattr(self, self.ties[0])
            self.register_parameter(name, weight)

    def forward(self, x_BH: Tensor) -> Tensor:
        """The sum of the parts' losses."""
        losses = [getattr(self, name)(x_BH) for name in self.names]
        losses += [(getattr(self, name) * x_BH.mean() - 1).square().sum() / 100 for name in self.ties]
        return torch.stack(losses).sum()


def tie(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    """Says that both stages use their first tie, under the name that the first one has."""
    del settings, say
    assert isinstance(model, Model)
    if mesh.spec.stages == 1 or not model.ties:
        return {}
    placement = RankPlacement(stages=(0, 1))
    return {id(getattr(model, model.ties[0])): CutParameter(placement, name="tie_of_first")}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the pipe axis, which is the slowest, as wide as asked."""

    def widen(size: int) -> None:
        rows = [row for row in AXES if row.name != "pipe"]
        monkeypatch.setattr(_AXES, "AXES", (AxisRow("pipe", "pipeline", lambda config: size, ("pipe",)), *rows))
        monkeypatch.setattr(_ROOT, "CUT_BY_AXES", (tie,))
        # A script runs stages by a schedule alone. Here each of them has a loss.
        monkeypatch.setattr(_ENGINE.Engine, "_refuse_parts", lambda *_, **__: None)

    return widen


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def run_ranks(
    stages: int, data: int, body: Callable[[Any, int, int], Any], stage: int, *, tied: bool = False, **more: Any
) -> list[Any]:
    """Runs `body` with the engine of each rank, its pipeline stage and its place on the data axis."""

    def made(rank: int) -> Model:
        return Model(PARTS if stages == 1 else (PARTS[rank // data],), tied=tied)

    models = [made(rank) for rank in range(stages * data)]

    def rank(collectives: LoopbackCollectives) -> Any:
        engine: Any = dsrun.initialize(model=models[collectives.rank], config=settings(stage, **more))[0]
        try:
            return body(engine, *divmod(collectives.rank, data))
        finally:
            engine.destroy()

    with ranks_of_threads(CPU) as run:
        return LoopbackWorld(stages * data).run(lambda collectives: run(collectives, rank))


def train(engine: Any, data_rank: int, data: int, *, steps: int = STEPS, spoil: float | None = None) -> list[float]:
    norms: list[float] = []
    for step in range(steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + data_rank)
            x_BH = torch.randn(MICRO, WIDTH, generator=generator)
            x_BH = x_BH.to(next(engine.module.parameters()).dtype)
            engine.backward(engine(x_BH if spoil is None else x_BH * spoil).float())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


class Ended:
    """Norms of the steps, then weights, states and buffers by name, as far as a rank has them."""

    def __init__(self, engine: Any, norms: list[float]) -> None:
        self.norms = norms
        self.values: dict[str, Tensor] = {name: value.clone() for name, value in engine.module.named_buffers()}
        for name, param in engine.module.named_parameters():
            with dsrun.zero.GatheredParameters([param]):
                self.values[name] = param.detach().clone()
            for role in ("exp_avg", "exp_avg_sq"):
                state = dsrun.utils.safe_get_full_optimizer_state(param, role)
                assert state is not None
                self.values[f"{name} {role}"] = state.clone()


def trained(stages: int, data: int, stage: int, **more: Any) -> list[Ended]:
    return run_ranks(
        stages, data, lambda engine, at, data_rank: Ended(engine, train(engine, data_rank, data)), stage, **more
    )


def assert_parts_of(found: list[Ended], expected: Ended) -> None:
    for one in found:
        assert one.norms == expected.norms, "the norm is of all stages, on every rank"
        for name, value in one.values.items():
            same = expected.values[name.replace("tie_of_last", "tie_of_first")]
            assert torch.equal(value, same), name


#: Each stage on one data rank or two; and the others, which these stand for.
PLACES = [
    (1, 0),
    (2, 1),
    (2, 2),
    *(
        pytest.param(data, stage, marks=pytest.mark.soak("each stage with one data rank or two, each of them too"))
        for data, stage in ((2, 0), (1, 1), (1, 2))
    ),
]


@pytest.mark.parametrize(("data", "stage"), PLACES)
def test_stages_with_other_parameters_train_to_the_bits_of_the_whole_model(
    stages: Callable[[int], None], stage: int, data: int
) -> None:
    stages(1)
    expected = trained(1, data, stage)
    stages(2)
    assert_parts_of(trained(2, data, stage), expected[0])


@pytest.mark.parametrize(("data", "stage"), PLACES)
def test_a_tied_weight_is_one_unit_whose_gradients_of_all_stages_add_up(
    stages: Callable[[int], None], stage: int, data: int
) -> None:
    stages(1)
    expected = trained(1, data, stage, tied=True)
    stages(2)
    found = trained(2, data, stage, tied=True)
    for one in found:
        assert one.norms == found[0].norms
        assert one.norms == pytest.approx(expected[0].norms, rel=1e-6), "each element counts once"
        for name, value in one.values.items():
            same = name.replace("tie_of_last", "tie_of_first")
            torch.testing.assert_close(value, expected[0].values[same], rtol=1e-5, atol=1e-6)
    firsts = [one.values.get("tie_of_first", one.values.get("tie_of_last")) for one in found]
    assert all(torch.equal(value, firsts[0]) for value in firsts), "the stages have one value"


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("spoiled", [0, 1])
def test_what_is_not_finite_in_one_stage_is_named_on_all_ranks(
    stages: Callable[[int], None], capsys: pytest.CaptureFixture[str], stage: int, spoiled: int
) -> None:
    stages(2)

    def body(engine: Any, at: int, data_rank: int) -> None:
        train(engine, data_rank, 2, steps=1, spoil=torch.inf if at == spoiled else 1.0)

    run_ranks(2, 2, body, stage)
    assert f"`{PARTS[spoiled]}.layer.weight`" in capsys.readouterr().out


#: Of a checkpoint: stages and data ranks before and after, whether weights are tied, and the stage of ZeRO.
CHANGES: list[tuple[tuple[int, int], tuple[int, int], bool, int]] = [
    ((2, 1), (1, 2), True, 0),
    ((2, 1), (1, 2), False, 2),
    ((2, 1), (1, 1), True, 1),
    ((2, 1), (2, 2), True, 2),
    ((2, 1), (2, 2), False, 0),
    ((1, 2), (2, 1), True, 0),
    ((1, 2), (2, 1), False, 1),
]
EVERY_CHANGE = [
    (before, after, tied, stage)
    for before, after in (((2, 1), (1, 2)), ((2, 1), (1, 1)), ((2, 1), (2, 2)), ((1, 2), (2, 1)))
    for tied in (False, True)
    for stage in (0, 1, 2)
]


@pytest.mark.parametrize(
    ("before", "after", "tied", "stage"),
    [
        *CHANGES,
        *(
            pytest.param(*change, marks=pytest.mark.soak("seven of 24, with nearly all pairs of what differs"))
            for change in EVERY_CHANGE
            if change not in CHANGES
        ),
    ],
)
def test_what_some_stages_save_any_other_number_loads(
    stages: Callable[[int], None],
    tmp_path: Path,
    stage: int,
    tied: bool,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    def save(engine: Any, at: int, data_rank: int) -> Ended:
        ended = Ended(engine, train(engine, data_rank, before[1]))
        assert engine.save_checkpoint(tmp_path, tag="stages", client_state={"epoch": 3})
        return ended

    def load(engine: Any, at: int, data_rank: int) -> Ended:
        path, client = engine.load_checkpoint(tmp_path, tag="stages")
        assert path is not None
        assert client["epoch"] == 3
        assert engine.global_steps == STEPS
        return Ended(engine, [])

    stages(before[0])
    saved = run_ranks(*before, save, stage, tied=tied)
    numel = sum(param.numel() for param in Model(PARTS, tied=tied).parameters())
    stored = sum(file.stat().st_size for file in (tmp_path / "stages").glob("*.safetensors"))
    assert stored < 1.2 * 3 * 4 * numel + 100_000, "everything once"
    stages(after[0])
    expected = {name: value for one in saved for name, value in one.values.items()}
    for one in run_ranks(*after, load, 2 - stage, tied=tied):
        for name, value in one.values.items():
            assert torch.equal(value, expected.get(name, expected.get(name.replace("last", "first")))), name


def test_a_tensor_of_no_stage_is_unexpected_and_one_that_a_stage_lacks_is_missing(
    stages: Callable[[int], None], tmp_path: Path
) -> None:
    def save(engine: Any, at: int, data_rank: int) -> None:
        assert engine.save_checkpoint(tmp_path, tag="tied")

    def load(engine: Any, at: int, data_rank: int) -> str:
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(tmp_path, tag="tied", load_optimizer_states=False)
        return str(raised.value)

    stages(2)
    run_ranks(2, 1, save, 1, tied=True)
    for text in run_ranks(2, 1, load, 1):
        assert "`tie_of_first` is not in the model" in text
        assert "layer" not in text, "other stages' tensors are known"

    def save_one(engine: Any, at: int, data_rank: int) -> None:
        assert engine.save_checkpoint(tmp_path, tag="plain")

    def load_tied(engine: Any, at: int, data_rank: int) -> str:
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(tmp_path, tag="plain", load_optimizer_states=False)
        return str(raised.value)

    run_ranks(2, 1, save_one, 1)
    for text in run_ranks(2, 1, load_tied, 1, tied=True):
        assert "no param of `tie_of_first`" in text


@pytest.mark.parametrize(
    ("stage", "data", "file"),
    [
        (0, 1, "model.bin"),
        (0, 2, "model.safetensors"),
        (2, 1, "model.safetensors"),
        (2, 2, "model.bin"),
        *(
            pytest.param(*case, marks=pytest.mark.soak("all pairs of stage, data ranks and file"))
            for case in (
                (0, 1, "model.safetensors"),
                (0, 2, "model.bin"),
                (2, 1, "model.bin"),
                (2, 2, "model.safetensors"),
            )
        ),
    ],
)
def test_whole_weights_go_out_of_all_stages_and_into_them(
    stages: Callable[[int], None], tmp_path: Path, stage: int, data: int, file: str
) -> None:
    def out(engine: Any, at: int, data_rank: int) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
        train(engine, data_rank, data, steps=1)
        engine.save_16bit_model(tmp_path, file)
        return engine.module_state_dict(), engine.module_state_dict(all_ranks=True)

    def into(engine: Any, at: int, data_rank: int) -> dict[str, Tensor]:
        engine.load_module_state_dict(whole)
        with pytest.raises(CheckpointError, match="`strange` is not in the model"):
            engine.load_module_state_dict({**whole, "strange": torch.zeros(1)})
        return engine.module_state_dict(all_ranks=True)

    stages(2)
    found = run_ranks(2, data, out, stage, tied=True)
    assert [first is None for first, _ in found] == [False] + [True] * (2 * data - 1)
    whole = found[0][1]
    assert {"tie_of_first", "tie_of_last", "first.layer.weight", "last.seen"} <= whole.keys()
    if file.endswith(".bin"):
        stored = torch.load(tmp_path / file, weights_only=True)
    else:
        stored = importlib.import_module("safetensors.torch").load_file(tmp_path / file)
    for name, value in whole.items():
        assert all(torch.equal(every[name], value) for _, every in found), name
        assert torch.equal(stored[name], value), name
    for again in run_ranks(2, data, into, stage, tied=True):
        assert all(torch.equal(again[name], value) for name, value in whole.items())
    stages(1)
    for again in run_ranks(1, 1, into, stage, tied=True):
        assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_ranks_of_one_stage_must_have_one_model_and_all_ranks_one_config(stages: Callable[[int], None]) -> None:
    stages(2)
    models = [Model((PARTS[rank // 2],)) for rank in range(4)]
    models[3] = Model((PARTS[1],), tied=True)

    def rank(collectives: LoopbackCollectives) -> str:
        with pytest.raises(DsrunError) as raised:
            dsrun.initialize(model=models[collectives.rank], config=settings(1))
        return str(raised.value)

    with ranks_of_threads(CPU) as run:
        for text in LoopbackWorld(4).run(lambda collectives: run(collectives, rank)):
            assert "the ranks of stage 1 do not agree with rank 2: rank 3 in the model's parameters" in text


def test_a_step_refuses_where_ranks_of_one_stage_wrote_other_parameters(stages: Callable[[int], None]) -> None:
    stages(2)

    def body(engine: Any, at: int, data_rank: int) -> str:
        train(engine, data_rank, 2, steps=1)
        if (at, data_rank) == (1, 0):
            with torch.no_grad():
                engine.module.last.layer.bias.fill_(1.0)
        with pytest.raises(ModelError) as raised:
            train(engine, data_rank, 2, steps=1)
        return str(raised.value)

    found = run_ranks(2, 2, body, 1, bf16={"enabled": True})
    assert all("stage 1" in text for text in found[:2])
    assert all("`last.layer.bias` was written to on some ranks" in text for text in found[2:])


def test_what_a_script_writes_to_a_tied_weight_on_one_stage_is_refused_by_name(stages: Callable[[int], None]) -> None:
    stages(2)

    def body(engine: Any, at: int, data_rank: int) -> None:
        param = next(param for name, param in engine.module.named_parameters() if "tie" in name)
        with pytest.raises(ModelError, match="pipeline stages 0 and 1 use it"):
            dsrun.utils.safe_set_full_fp32_param(param, torch.zeros(300))
        opened = dsrun.zero.GatheredParameters([param], modifier_rank=0)
        with pytest.raises(ModelError, match="pipeline stages 0 and 1 use it"), opened:
            raise AssertionError("nobody comes here")

    run_ranks(2, 1, body, 1, tied=True)
