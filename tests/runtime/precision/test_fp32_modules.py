"""What a 16-bit model keeps in fp32: which tensors, casts at their borders, the same bits at every stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.config.load import load
from dsrun.errors import ModelError
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.run.settings import read_settings
from dsrun.runtime.engine.compose.describe import describe_units
from dsrun.runtime.precision.fp32_modules import cast_at_borders, find_fp32_modules
from support.inside_engine import predicted_bytes, store_of, units_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)


def settings(stage: int, names: Any, *, fp16: bool = False, **more: Any) -> dict[str, Any]:
    own = config(
        stage, micro=2, bf16=not fp16, data_types={"keep_in_fp32_modules": names, **more.pop("types", {})}, **more
    )
    return {**own, "fp16": {"enabled": fp16, "loss_scale": 32}}


def model(**options: Any) -> TinyGPT:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"width": 36, "layers": 2, **options}
    return TinyGPT(**sizes)


def frozen_model() -> TinyGPT:
    made = model()
    dict(made.named_parameters())["blocks.0.norm_1.weight"].requires_grad_(False)
    dict(made.named_parameters())["blocks.1.up.weight"].requires_grad_(False)
    return made


def names_of(made: nn.Module, dtype: torch.dtype) -> set[str]:
    return {name for name, param in made.named_parameters() if param.dtype == dtype}


def _train(groups: list[list[dict[str, Any]]], frozen: bool) -> list[list[tuple[list[float], dict[str, Tensor]]]]:
    dsrun.init_distributed()
    return [[_train_one(case, frozen) for case in group] for group in groups]


def _train_one(case: dict[str, Any], frozen: bool) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(case, model=frozen_model() if frozen else model())
    if case["zero_optimization"]["stage"] == 3:
        store_of(engine).poison = True
    samples = 4 * case["gradient_accumulation_steps"]
    return train(engine, range(3), samples=samples), full_parameters(engine)


def _agree(groups: list[list[dict[str, Any]]], *, frozen: bool = False) -> None:
    """The cases of a group give the same bits on two ranks, and learn."""
    for of_rank in run_ranks(2, _train, groups, frozen):
        for group, results in zip(groups, of_rank, strict=True):
            losses, weights = results[0]
            assert losses[-1] < losses[0], "it learns"
            for case, (found, of_case) in zip(group, results, strict=True):
                assert found == losses, case
                for name, value in weights.items():
                    assert torch.equal(of_case[name], value), f"{name}: {case}"


def test_stages_agree_bit_for_bit_and_learn_with_a_wire_and_recomputation_too() -> None:
    recompute: dict[str, Any] = {"activation_checkpointing": {"policy": "every_block"}}
    _agree(
        [
            [settings(stage, ["norm"]) for stage in STAGES],
            [settings(stage, ["blocks.0.", "scale"]) for stage in (1, 3)],
            [settings(stage, ["embed", "head"]) for stage in (0, 2, 3)],
            [settings(stage, ["norm"], communication_data_type="fp32") for stage in (1, 3)],
            [settings(0, ["norm", "up"]), settings(3, ["norm", "up"], **recompute)],
            [settings(stage, ["norm"], fp16=True) for stage in (0, 3)],
        ]
    )


def test_they_agree_with_frozen_parameters_and_other_sums() -> None:
    narrow: dict[str, Any] = {"types": {"grad_accum_dtype": "bf16"}, "accumulation": 2}
    _agree([[settings(stage, ["norm", "head"], **narrow) for stage in (0, 1, 3)]], frozen=True)


@pytest.mark.parametrize("stage", STAGES)
def test_named_parameters_and_gradients_are_fp32_and_their_own_masters(stage: int) -> None:
    made = frozen_model()
    engine = make_engine(settings(stage, ["norm", "scale"]), model=made)
    assert names_of(made, torch.float32) == {name for name, _ in made.named_parameters() if "norm" in name}
    assert made.scale.dtype == torch.float32
    (unit,) = (unit for unit in units_of(engine) if unit.name == "rest in fp32")
    assert unit.flat_grad.dtype == torch.float32
    assert unit.master.data_ptr() == unit.shard.data_ptr()
    train(engine, range(1), samples=2)


@pytest.mark.parametrize(("stage", "types"), [(0, {}), (3, {}), (2, {"grad_accum_dtype": "bf16"})])
@pytest.mark.parametrize("names", [["norm", "head"], ["*"]])
def test_a_rank_holds_as_many_bytes_as_predicted(stage: int, types: dict[str, Any], names: list[str]) -> None:
    engine = make_engine(settings(stage, names, types=types), model=frozen_model())
    train(engine, range(1), samples=2)
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    counts = 4 * sum(1 for value in states if not value.dim())
    assert engine.model_state_bytes() == predicted_bytes(engine) + counts


@pytest.mark.parametrize(("stage", "fp16"), [(0, False), (1, True), (2, False), (3, True), (3, False)])
@pytest.mark.parametrize("names", [["norm", "head"], ["*"]])
def test_a_plan_counts_these_bytes_of_a_model_that_a_run_has_described(
    stage: int, fp16: bool, names: list[str]
) -> None:
    case, made = settings(stage, names, fp16=fp16, types={"grad_accum_dtype": "fp16" if fp16 else None}), model()
    engine = make_engine(case, model=made)
    size = ModelSize.from_json(describe_units(made, units_of(engine)).to_json())
    planned = state_bytes(pad_units(size.units, 1), read_settings(load(case), ranks=1))
    assert planned.total == predicted_bytes(engine)


def test_a_run_goes_on_from_a_checkpoint_at_another_stage_and_without_the_list(tmp_path: Path) -> None:
    whole = make_engine(settings(0, ["norm"]), model=model())
    expected = train(whole, range(4), samples=2)
    stopped = make_engine(settings(3, ["norm"]), model=model())
    before = train(stopped, range(2), samples=2)
    stopped.save_checkpoint(tmp_path)
    resumed = make_engine(settings(1, ["norm"]), model=model(), seed=8)
    resumed.load_checkpoint(tmp_path)
    assert before + train(resumed, range(2, 4), samples=2) == expected
    other = make_engine(settings(2, []), model=model(), seed=8)
    other.load_checkpoint(tmp_path)
    train(other, range(2, 4), samples=2)


@pytest.mark.parametrize("names", [["nrom"], ["norm", "heads"]])
@pytest.mark.parametrize("bf16", [True, False])
def test_a_pattern_that_matches_nothing_is_an_error_in_fp32_too(names: list[str], bf16: bool) -> None:
    case = config(1, micro=2, bf16=bf16, data_types={"keep_in_fp32_modules": names})
    message = rf"`data_types\.keep_in_fp32_modules` has '{names[-1]}', which matches the name of no parameter or buffer"
    with pytest.raises(ModelError, match=message):
        make_engine(case, model=model())


def test_auto_keeps_buffers_that_classes_of_transformers_list() -> None:
    class Router(nn.Module):
        _keep_in_fp32_modules_strict = ("correction",)
        _keep_in_fp32_modules = ("other",)

        def __init__(self) -> None:
            super().__init__()
            self.correction_weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("correction", torch.zeros(2))
            self.register_buffer("other", torch.zeros(2))
            self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    made = nn.ModuleDict({"router": Router(), "plain": nn.BatchNorm1d(2)})
    buffers = dict(made.named_buffers())
    for compute, expected in (
        (torch.bfloat16, {"router.correction"}),
        (torch.float16, {"router.correction", "router.other"}),
        (torch.float32, set[str]()),
    ):
        kept = find_fp32_modules(made, "auto", compute=compute)
        assert {name for name, buffer in buffers.items() if id(buffer) in kept.tensors} == expected
        assert kept.modules == ()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
def test_buffers_have_the_format_that_the_config_says(dtype: str | None, expected: torch.dtype) -> None:
    made = model()
    make_engine(config(1, micro=2, bf16=True, data_types={"buffer_dtype": dtype, "param_dtype": "bf16"}), model=made)
    assert made.scale.dtype == expected
    assert names_of(made, torch.bfloat16) == {name for name, _ in made.named_parameters()}


class Seen(nn.Linear):
    """Notes the formats that it gets and gives."""

    formats: list[torch.dtype]

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        self.formats = [input.dtype, made.dtype]
        return made


def test_a_border_casts_in_and_back_but_not_where_the_model_does_it_itself() -> None:
    inner = Seen(4, 4)
    block = nn.Sequential(inner, nn.Embedding(3, 4))
    made = nn.ModuleDict({"block": block, "other": nn.Linear(4, 4)})
    kept = find_fp32_modules(made, ["block"], compute=torch.bfloat16)
    assert kept.modules == (block, inner, block[1])
    for _ in range(2):  # the hooks of an engine before are taken off
        cast_at_borders(made, kept, torch.bfloat16)
    assert inner(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert inner.formats == [torch.float32, torch.float32]
    assert inner(torch.ones(2, 4)).dtype == torch.float32
    assert block[1](torch.tensor([1])).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        inner(torch.ones(2, 5, dtype=torch.bfloat16))
    assert inner(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16, "an error leaves nothing behind"
    (twin,) = (module for module in copy.deepcopy(made).modules() if isinstance(module, Seen))
    assert twin(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    cast_at_borders(made, find_fp32_modules(made, (), compute=torch.bfloat16), torch.bfloat16)
    assert inner(torch.ones(2, 4)).dtype == torch.float32
    assert block[1](torch.tensor([1])).dtype == torch.float32


def test_inside_of_a_border_nothing_is_cast() -> None:
    inner = Seen(4, 4)
    made = nn.ModuleDict({"block": nn.Sequential(nn.Linear(4, 4), inner), "other": nn.Linear(4, 4)})
    cast_at_borders(made, find_fp32_modules(made, ["block"], compute=torch.float16), torch.float16)
    assert made["block"](torch.ones(2, 4, dtype=torch.float16)).dtype == torch.float16
    assert inner.formats == [torch.float32, torch.float32]


def test_a_tied_parameter_is_named_by_any_of_its_names() -> None:
    made = model(tied=True)
    for name in ("embed.weight", "head.weight"):
        assert find_fp32_modules(made, [name], compute=torch.bfloat16).tensors == {id(made.embed.weight)}
