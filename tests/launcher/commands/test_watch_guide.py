"""docs/guides/watch.md: its tables have every row of the page and every metric, and none besides."""

from __future__ import annotations

import re
from pathlib import Path

from dsrun.launcher.dashboard import page
from dsrun.launcher.dashboard.job_metrics import all_metrics

GUIDE = (Path(__file__).parents[3] / "docs/guides/watch.md").read_text(encoding="utf-8")


def test_the_guide_names_every_row_of_the_page() -> None:
    source = Path(page.__file__).read_text(encoding="utf-8")
    drawn = set(re.findall(r'_labelled\("(\w+)"', source))
    told = set(re.findall(r"^\| `(\w+)` \|", GUIDE.partition("## Without")[0], re.MULTILINE))
    assert told == drawn


def test_the_guide_names_every_metric() -> None:
    told = set(re.findall(r"`(dsrun_\w+)`", GUIDE))
    # How many jobs run needs no word.
    assert told | {"dsrun_jobs"} == set(all_metrics())
