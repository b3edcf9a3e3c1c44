"""No dtype of a model changes without a line that says which became which, and by which key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsrun.errors import ModelError
from support.training import config, full_parameters, make_engine, train

BF16_KEEPS = 'neither `bf16` nor `fp16` is enabled, "bf16": {"enabled": true} keeps them'


class Model(nn.Module):
    """A Linear in one format, a scalar in another, a frozen table and buffers."""

    def __init__(self, main: torch.dtype, scale: torch.dtype, buffer: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=main)
        self.scale = nn.Parameter(torch.ones((), dtype=scale))
        self.table = nn.Parameter(torch.ones(4, dtype=main), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(4), requires_grad=False)
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4, dtype=buffer))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale) + self.table


def told(capfd: pytest.CaptureFixture[str], model: nn.Module, **more: Any) -> tuple[Any, list[str]]:
    """The engine, and what was said of dtypes."""
    capfd.readouterr()
    engine = make_engine(config(more.pop("stage", 0), micro=2, **more), model=model)
    return engine, [line for line in capfd.readouterr().out.splitlines() if " built in " in line]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_16_bit_model_without_a_section_is_said_to_train_in_fp32(
    stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, lines = told(capfd, Model(torch.bfloat16, torch.float32, torch.bfloat16), stage=stage)
    assert lines == [
        "dsrun: 3 parameters (`table`, `layer.weight`, `layer.bias`) were built in bfloat16 and are float32 here: "
        + BF16_KEEPS,
        "dsrun: 1 buffer (`mean`) was built in bfloat16 and is float32 here: neither `bf16` nor `fp16` is enabled, "
        '`data_types.buffer_dtype` "bf16" keeps them',
    ]
    module = engine.module
    dtypes = {module.layer.weight.dtype, module.scale.dtype, module.table.dtype, module.mean.dtype}
    assert dtypes == {torch.float32}
    others = (module.counts.dtype, module.phases.dtype, module.seen.dtype)
    assert others == (torch.int64, torch.complex64, torch.int64)
    assert bool((module.counts == torch.arange(4)).all())


def test_what_a_section_asks_for_is_not_said_and_what_it_does_besides_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert told(capfd, Model(torch.float32, torch.float32), bf16=True)[1] == []
    assert told(capfd, Model(torch.bfloat16, torch.bfloat16, torch.bfloat16), bf16=True)[1] == []
    assert told(capfd, Model(torch.float32, torch.float16, torch.float64), bf16=True)[1] == [
        "dsrun: 1 parameter (`scale`) was built in float16 and is bfloat16 here: `bf16.enabled` is true",
        "dsrun: 1 buffer (`mean`) was built in float64 and is bfloat16 here: `bf16.enabled` is true",
    ]
    types = {"buffer_dtype": "fp32", "keep_in_fp32_modules": ["scale"]}
    assert told(capfd, Model(torch.float32, torch.float16, torch.float64), bf16=True, data_types=types)[1] == [
        "dsrun: 1 parameter (`scale`) was built in float16 and is float32 here: `data_types.keep_in_fp32_modules` "
        "names them",
        'dsrun: 1 buffer (`mean`) was built in float64 and is float32 here: `data_types.buffer_dtype` is "fp32"',
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_float64_is_refused_with_all_names_unless_a_key_says_what_becomes_of_it(
    stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError) as raised:
        make_engine(config(stage, micro=2), model=Model(torch.float64, torch.float32))
    assert str(raised.value) == (
        "model: 3 parameters (`table`, `layer.weight`, `layer.bias`) were built in float64; dsrun trains in fp32, bf16 "
        "or fp16"
    )
    assert raised.value.hint is not None
    assert '"data_types": {"param_dtype": "fp32"}' in raised.value.hint
    _, lines = told(capfd, Model(torch.float32, torch.float64), stage=stage, data_types={"param_dtype": "fp32"})
    assert lines == [
        "dsrun: 1 parameter (`scale`) was built in float64 and is float32 here: neither `bf16` nor `fp16` is enabled"
    ]
    _, lines = told(capfd, Model(torch.float64, torch.float64), stage=stage, bf16=True)
    assert lines == [
        "dsrun: 4 parameters (`scale`, `table`, `layer.weight`, ...) were built in float64 and are bfloat16 here: "
        "`bf16.enabled` is true"
    ]


def test_tensors_in_8_bits_are_refused_for_their_scale_is_elsewhere() -> None:
    model = Model(torch.float32, torch.float32)
    model.table = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ModelError, match="`table` is float8_e4m3fn; a cast would leave out the scale"):
        make_engine(config(0, micro=2, bf16=True), model=model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("again", [False, True])
def test_a_second_engine_begins_with_exact_weights_at_stage_3_and_with_rounded_ones_below(
    stage: int, again: bool
) -> None:
    first = make_engine(config(stage, micro=2, bf16=True))
    train(first, range(2), samples=2)
    masters = full_parameters(first)
    first.destroy()
    second = make_engine(config(stage, micro=2, bf16=again), model=first.module)
    for name, value in full_parameters(second).items():
        expected = masters[name] if stage == 3 else masters[name].bfloat16().float()
        assert torch.equal(value, expected), name
    second.destroy()
