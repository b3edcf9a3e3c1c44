"""`"auto"` sizes of stage 3 go by the model's width when an engine is made, and are told."""

from __future__ import annotations

import pytest
from torch import nn

from support.models import TinyGPT
from support.training import config, make_engine

KEYS = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            TinyGPT(width=72),
            '"auto" is `stage3_prefetch_bucket_size` 4,665, `stage3_param_persistence_threshold` 720, '
            "of 2 gather slots",
        ),
        (
            nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)),
            '"auto" is `stage3_prefetch_bucket_size` the default, `stage3_param_persistence_threshold` the default, of '
            "2 gather slots",
        ),
    ],
)
def test_auto_is_a_number_once_the_width_is_known(
    model: nn.Module, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(3, micro=1)
    settings["zero_optimization"].update(KEYS)
    make_engine(settings, model=model)
    assert f"dsrun: {told}\n" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [2, 3])
def test_without_auto_nothing_is_told(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(config(stage, micro=1))
    assert "auto" not in capsys.readouterr().out
