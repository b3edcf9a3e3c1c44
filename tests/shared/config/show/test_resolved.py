"""The resolved config and where its values come from."""

from __future__ import annotations

from pathlib import Path

from dsrun.config.load import load
from dsrun.config.show.resolved import document, rows

CONFIG = """\
{
  "train_batch_size": 16,
  "gradient_clipping": "auto",
  "bfloat16": {"enabled": true},
  "optimizer": {"type": "adamw", "params": {"lr": "1e-4"}}
}
"""


def shown(path: Path, *, diff_defaults: bool = False) -> dict[str, tuple[object, str]]:
    config = load(path, world_size=2)
    return {row.path: (row.value, str(row.source)) for row in rows(config, diff_defaults=diff_defaults)}


def test_every_value_has_its_source(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(CONFIG)
    table = shown(path)
    assert table["train_batch_size"] == (16, f"{path}:2:3")
    assert table["train_micro_batch_size_per_gpu"] == (
        8,
        "derived, from the other batch sizes and the number of ranks",
    )
    assert table["gradient_clipping"] == (1.0, "auto, the default")
    assert table["bf16.enabled"] == (True, f"{path}:4:16")
    assert table["optimizer.type"] == ("AdamW", f"{path}:5:17")
    assert table["optimizer.params.lr"] == (1e-4, f"{path}:5:45")
    assert table["optimizer.params.betas"] == ([0.9, 0.999], "default")
    assert "fp16.loss_scale" not in table


def test_values_that_equal_the_default_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(CONFIG)
    assert list(shown(path, diff_defaults=True)) == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer.type",
        "optimizer.params.lr",
        "bf16.enabled",
    ]


def test_a_default_that_differs_from_deepspeeds_says_so() -> None:
    differs = {row.path: row.differs for row in rows(load({}))}
    assert differs["gradient_clipping"] == "0, no clipping, before 0.19"


def test_what_is_shown_loads_as_the_same_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(CONFIG)
    config = load(path, world_size=2)
    again = load(document(config), world_size=2)
    assert again.batch == config.batch
    assert document(again) == document(config)
