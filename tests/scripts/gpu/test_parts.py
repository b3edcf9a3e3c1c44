"""Parts of the GPU check: their order, their time, and proofs that come from the tree of tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.driver import Part, chosen, estimate_s
from gpu.models import Llama
from gpu.parts import TESTS, listing_part, main_parts, proof_parts
from gpu.proofs import candidates
from gpu.shapes import LLAMA_1B3, LLAMA_7B, TINY, LlamaShape

#: What the machines that the check is for have.
H100 = {"memory_bytes": 128 << 30, "gpu_bytes": 79 << 30, "disk_bytes": 60 << 30}


def listed(**folders: float) -> dict[str, Any]:
    """Two tests a folder, which take so many seconds together."""
    names = {folder.replace("__", "/"): seconds for folder, seconds in folders.items()}
    tests = {
        folder: {f"tests/{folder}/test_a.py::test_{n}": seconds / 2 for n in range(2)}
        for folder, seconds in names.items()
    }
    return {"state": "ok", "result": {"folders": tests, "errors": {}, "tests": 2 * len(folders)}}


def everything(**folders: float) -> list[Any]:
    proofs = proof_parts(listed(**folders), device="cuda")
    return main_parts(proofs, device="cuda", size="1.3B", facts=H100)


def test_every_marked_test_of_this_run_is_in_a_file_that_the_proofs_collect(request: pytest.FixtureRequest) -> None:
    marked = {item.path for item in request.session.items if item.get_closest_marker("cuda") is not None}
    assert marked <= set(candidates(TESTS))


def test_every_folder_is_in_one_of_three_parts_with_numbers_first() -> None:
    found, *parts = proof_parts(listed(launcher=12, runtime__memory=10, runtime__mesh=9, e2e=1), device="cuda")
    assert found.name == "proofs found"
    assert [part.name for part in parts] == ["proofs runtime", "proofs mesh", "proofs elsewhere"]
    files = [word for part in parts for word in part.argv if word.endswith(".py")]
    assert sorted(files) == sorted(
        str(TESTS / folder / "test_a.py") for folder in ("launcher", "runtime/memory", "runtime/mesh", "e2e")
    )


def test_the_row_of_the_listing_has_numbers_in_place_of_names() -> None:
    found, *_ = proof_parts(listed(launcher=9, e2e=1), device="cuda")
    assert found.row({})["result"]["folders"] == {"launcher": 2, "e2e": 2}


def test_a_part_takes_its_tests_seconds_and_the_start_of_its_process_and_may_take_three_times_that() -> None:
    _, short, long = proof_parts(listed(runtime__memory=4, e2e=34), device="cuda")
    assert long.estimate_s - short.estimate_s == pytest.approx(30)
    assert 4 < short.estimate_s < 14
    for part in (short, long):
        assert isinstance(part, Part)
        assert part.limit_s >= 3 * part.estimate_s + 30


def test_where_the_tests_could_not_be_listed_files_are_taken_by_their_text() -> None:
    found, *parts = proof_parts({"state": "failed", "why": "ended by SIGABRT"}, device="cuda")
    assert (found.row({})["state"], found.row({})["why"]) == ("failed", "ended by SIGABRT")
    files = {word for part in parts for word in part.argv if word.endswith(".py")}
    assert files == set(map(str, candidates(TESTS)))


def test_what_runs_by_default_fits_eight_minutes_and_the_proofs_three() -> None:
    parts = everything(runtime__mesh=40, runtime__activation=20, runtime__engine=50, e2e=42)
    assert estimate_s(chosen(parts, ())) <= 8 * 60
    assert 170 <= estimate_s(chosen(parts, ("proofs",))) <= 3 * 60, "with what it takes to find them"


def test_proofs_come_first_then_parity_then_figures() -> None:
    names = [part.name.split()[0] for part in chosen(everything(runtime__memory=9), ())]
    assert list(dict.fromkeys(names)) == ["probe", "proofs", "parity", "buses", "overhead", "llama"]


def test_no_part_is_ended_before_it_has_taken_what_it_probably_takes() -> None:
    parts = [part for part in everything(runtime__memory=9, e2e=1) if isinstance(part, Part)]
    assert [part.name for part in parts if part.limit_s < part.estimate_s] == []
    # The first processes import torch from a cold disk.
    assert min(parts[0].limit_s, listing_part("cuda").limit_s) >= 120
    assert len({part.name for part in parts}) == len(parts)


def test_offload_is_measured_with_as_many_blocks_as_fit_for_all_contenders_alike() -> None:
    def layers(memory_gib: int) -> set[str]:
        facts = H100 | {"memory_bytes": memory_gib << 30}
        parts = main_parts([], device="cuda", size="1.3B", facts=facts)
        found = [part for part in parts if isinstance(part, Part) and part.name.startswith("offload 7B")]
        assert len(found) == 4
        return {part.argv[part.argv.index("--layers") + 1] for part in found}

    (small,), (large,) = layers(128), layers(1024)
    assert 16 <= int(small) < 32
    assert large == "32"


def test_the_largest_model_is_looked_for_from_one_that_fits() -> None:
    parts = {part.name: part for part in main_parts([], device="cuda", size="1.3B", facts=H100)}
    for tier, nbytes, at_most in (("disk", 60 << 30, 12), ("gpu", H100["gpu_bytes"], 16), ("ram", 128 << 30, 16)):
        argv = parts[f"largest dsrun-{tier}"].argv
        first = int(argv[argv.index("--from-layers") + 1])
        assert first >= 8
        assert at_most * LLAMA_7B.with_layers(first).numel() < 0.7 * nbytes


def test_without_a_gpu_a_real_file_of_tests_stands_for_the_proofs() -> None:
    part = listing_part("cpu")
    assert "not cuda" in part.argv
    assert [word for word in part.argv if word.endswith(".py")]


@pytest.mark.parametrize("shape", [TINY, LLAMA_1B3], ids=["tiny", "1.3B"])
def test_parameters_are_counted_without_building_the_model(shape: LlamaShape) -> None:
    with torch.device("meta"):
        assert shape.numel() == sum(param.numel() for param in Llama(shape).parameters())


def test_blocks_that_fit_are_at_least_one_and_at_most_the_shapes_own() -> None:
    assert LLAMA_7B.layers_within(0, bytes_per_parameter=16) == 1
    assert LLAMA_7B.layers_within(1 << 50, bytes_per_parameter=16) == 32
