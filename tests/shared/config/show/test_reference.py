"""docs/config.md and docs/config.schema.json say what the models say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.config.knob import Status
from dsrun.config.show.keys import all_keys
from dsrun.config.show.reference import page, schema_text

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize(("name", "text"), [("config.md", page()), ("config.schema.json", schema_text())])
def test_generated_files_are_up_to_date(name: str, text: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == text, "run `python -m dsrun.config.show.reference docs`"


def test_every_key_says_what_it_means_and_why_where_it_does_not_work() -> None:
    for key in all_keys():
        assert key.meaning.text.endswith((".", "?")), key.path
        assert key.status is Status.WORKS or key.reason, key.path
        assert not key.reason.endswith("."), key.path


def test_the_page_has_every_key() -> None:
    text = page()
    assert [key.path for key in all_keys() if key.inner is None and f"| `{key.name}` |" not in text] == []


@pytest.mark.parametrize(
    "name",
    [
        "overlap_comm",
        "contiguous_gradients",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "ignore_unused_parameters",
        "sub_group_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
    ],
)
def test_every_size_and_switch_of_communication_works_or_says_why_it_has_no_meaning(name: str) -> None:
    (key,) = (key for key in all_keys() if key.path == f"zero_optimization.{name}")
    assert key.status in (Status.WORKS, Status.NO_MEANING)
