"""scripts/bench/layouts.py: its layouts train one model, are predicted from probes alone, and are compared by pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.layouts_parts.rank_order import Agreement, agreement

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import layouts

    return layouts


def test_pairs_are_alike_reversed_or_tied() -> None:
    assert agreement([1, 2, 3, 4], [10, 20, 30, 40]).tau == 1
    assert agreement([1, 2, 3, 4], [4, 3, 2, 1]).tau == -1
    found = agreement([1, 2, 3, 4], [1, 3, 2, 2])
    assert found == Agreement(alike=3, reversed=2, tied=1)
    assert found.tau == pytest.approx(1 / 6)


def test_eight_layouts_of_four_ranks_train_one_model_on_one_batch(layouts: Any) -> None:
    jobs = layouts.LAYOUTS
    assert len({job.name for job in jobs}) == 8
    assert {job.ranks for job in jobs} == {4}
    assert all(job.micro_samples * job.micros * job.data == job.samples for job in jobs)
    assert len({job.llama.to_json() for job in jobs}) == 1


def seconds_of(job: Any, layouts: Any, *, rate: float = 1e9, cores: float = 4) -> dict[str, float]:
    """Returns the seconds of each path, where all that is probed goes at one rate of bytes and FLOPs."""
    from layouts_parts.products import flops_of

    sizes = {"products": 0, "update": 28}
    seconds = {
        probe: flops_of(job, tokens=probe.size, tensor=probe.ranks) / rate
        if probe.what == "products"
        else probe.size * sizes.get(probe.what, 1) / rate
        for probe in layouts.probes_of(job)
    }
    prediction = layouts.predicted(job, seconds, cores)
    assert prediction.step.complete
    return {path.path: path.seconds for path in prediction.paths}


def test_speeds_come_from_the_probes_of_the_layout_s_own_sizes(layouts: Any) -> None:
    for job in layouts.LAYOUTS:
        found = seconds_of(job, layouts)
        traffic = layouts.predicted(job, dict.fromkeys(layouts.probes_of(job), 1.0), 4).traffic
        stretch = found["compute"] * 1e9 / traffic.flops
        assert (stretch > 1.01) == (job.pipe > 1), "with a core each, bubbles cost time"
        assert found["optimizer"] == pytest.approx(traffic.optimizer_bytes / 1e9, rel=1e-5)
        moved = sum(found.get(name, 0) / (stretch if name == "tensor" else 1) for name in ("data", "tensor", "pipe"))
        buffers = sum(sum(axis.buffers.values()) for axis in traffic.axes)
        assert moved == pytest.approx(buffers / 1e9, rel=1e-6), "a probe of a buffer takes its bytes' time"


def test_ranks_that_shared_cores_in_a_probe_share_them_in_the_prediction_as_well(layouts: Any) -> None:
    job = next(job for job in layouts.LAYOUTS if job.data == 4)
    assert seconds_of(job, layouts, cores=2) == pytest.approx(seconds_of(job, layouts, cores=4))
    alone = next(job for job in layouts.LAYOUTS if job.pipe == 4 and job.schedule == "1f1b")
    ratio = seconds_of(alone, layouts, cores=2)["compute"] / seconds_of(alone, layouts, cores=4)["compute"]
    assert 0.5 <= ratio < 0.9, "who waits leaves its part of a core to the others"


@pytest.mark.soak("what it is made of is tested above, and teams of this model in test_tensor.py")
@pytest.mark.timeout(300)
def test_layouts_take_their_steps_beside_the_probes(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / "layouts.py"), "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    names = ["d2 stage 3", "t2 stage 0", "p2 stage 0, 1f1b"]
    assert [row["name"] for row in found["rows"]] == names
    assert all(len(row["steps_s"]) == 2 and row["predicted_s"] > 0 for row in found["rows"])
    assert all(f"| {name} |" in done.stdout for name in names)
    assert found["alike"] + found["reversed"] + found["tied"] == 3
    assert f"- Kendall tau >= 0.7: {found['tau']:.2f}, " in done.stdout


def test_figures_of_a_quick_run_are_not_written() -> None:
    command = [sys.executable, str(BENCH / "layouts.py"), "--quick", "--write"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--write: figures of --quick are no results" in done.stderr


def test_the_section_of_the_page_is_put_in_its_place_and_replaced(layouts: Any) -> None:
    page = "# Page\n\n## Tensor parallelism\nwords\n\n## On a GPU\nmore\n"
    once = layouts.with_section(page, "## The order of layouts\nfirst")
    assert once == page.replace("## On", "## The order of layouts\nfirst\n\n## On")
    again = layouts.with_section(once, "## The order of layouts\nsecond")
    assert again == once.replace("first", "second")


def test_losses_that_differ_are_no_result(layouts: Any) -> None:
    jobs = layouts.LAYOUTS[:2]
    layouts.compare_losses(jobs, [[{"loss": 1.0}], [{"loss": 1.0005}]])
    with pytest.raises(RuntimeError, match="do not train the same model: losses"):
        layouts.compare_losses(jobs, [[{"loss": 1.0}], [{"loss": 1.01}]])
