"""Pages of reports in a headless Chromium: they ask for nothing, complain of nothing, and their plots have a size.

The pages stand in frames of a page of the test, wide and narrow, whose script measures them: all in one start of the
browser.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke
from support.job_records import leave_job
from support.recorded_runs import a_step, append_records, step_line
from support.report_jobs import leave_trained_job

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (`apt-get install chromium`)")

WIDE, NARROW = 1280, 360
MEASURE = """
<script>
const measured = [];
const frames = [...document.querySelectorAll("iframe")];
const measure = frame => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const visible = each => each.getClientRects().length > 0;
  const area = page.querySelector(".area-box[data-y]");
  if (area) {
    const box = area.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + 9, bubbles: true };
    area.dispatchEvent(new view.PointerEvent("pointermove", at));
  }
  const key = page.querySelector("[data-toggles]");
  if (key) key.click();
  return {
    requests: view.performance.getEntriesByType("resource").length,
    plots: [...page.querySelectorAll("svg")].filter(visible).map(each => {
      const box = each.getBoundingClientRect();
      return [Math.round(box.width), Math.round(box.height)];
    }),
    told: [...page.querySelectorAll(".read:not(.hidden)")].map(each => each.textContent),
    hidden: page.querySelectorAll("path.hidden").length,
    too_wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    dark: view.getComputedStyle(page.body).backgroundColor,
    mode: page.compatMode,
  };
};
window.onload = () => {
  document.body.innerHTML = "<pre>" + JSON.stringify(frames.map(measure)) + "</pre>";
};
</script>
"""
#: Shows that requests are seen and complaints heard: a page as ours are, but for these.
CONTROL = "<!DOCTYPE html><script>console.error('heard')</script><img src='http://127.0.0.1:9/x.png'>"


def measured(folder: Path, frames: list[tuple[str, int]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Opens pages of a folder in frames of these widths; returns what each says, and what the console does."""
    boxes = "".join(f'<iframe src="{name}" width="{width}" height="900"></iframe>' for name, width in frames)
    (folder / "measure.html").write_text(f"<!DOCTYPE html><body>{boxes}{MEASURE}</body>")
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000"),
        # Frames of files may look into each other; no host has an address.
        *("--disable-web-security", "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--dump-dom", f"file://{folder / 'measure.html'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_pages_ask_for_nothing_and_their_plots_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    jobs = tmp_path / "state" / "dsrun" / "jobs"
    for number, job_id in enumerate(("first", "second", "third"), start=1):
        leave_trained_job(jobs, job_id, steps=200, fails_at=150 if number == 1 else None, seed=number)
    assert invoke("report", "first").exit_code == 0
    assert invoke("report", "first", "second", "third").exit_code == 0
    gaps = leave_job(jobs, "gaps", outcome="done")
    losses = [(step, 3 + step / 100 if step % 2 else None) for step in range(1, 101)]
    append_records(gaps, [step_line(a_step(step, loss=loss)) for step, loss in losses])
    assert invoke("report", "gaps").exit_code == 0
    Path("control.html").write_text(CONTROL)
    pages = [("first.html", WIDE), ("first.html", NARROW), ("jobs.html", WIDE), ("jobs.html", NARROW)]
    (*ours, with_gaps, control), console = measured(tmp_path, [*pages, ("gaps.html", WIDE), ("control.html", WIDE)])
    assert control["requests"] == 1
    assert [line for line in console if "heard" not in line and "x.png" not in line and "127.0.0.1:9" not in line] == []
    assert any("heard" in line for line in console)
    for (name, width), page in zip(pages, ours, strict=True):
        assert page["requests"] == 0, name
        assert page["mode"] == "CSS1Compat", "a page in quirks mode is laid out as in 1998"
        assert page["too_wide"] <= 0, f"{name} is wider than {width} pixels"
        assert len(page["plots"]) == (15 if name == "first.html" else 6), page["plots"]
        assert all(across >= 200 and down >= 60 for across, down in page["plots"]), page["plots"]
        assert page["hidden"] == 1, "a click on the legend hides a series"
        assert len(page["told"]) == 1, "values are told under the pointer"
    assert "\nloss  3.51\n" in with_gaps["told"][0], "a point between two gaps is told too"
    assert ours[0]["told"][0].startswith("10"), ours[0]["told"]
    assert "smoothed  4." in ours[0]["told"][0] or "smoothed  5." in ours[0]["told"][0], ours[0]["told"]
