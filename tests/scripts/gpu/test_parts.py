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


def listed(**folders: int) -> dict[str, Any]:
    ids = {
        folder.replace("__", "/"): [f"tests/{folder.replace('__', '/')}/test_a.py::test_{n}" for n in range(count)]
        for folder, count in folders.items()
    }
    return {"state": "ok", "result": {"folders": ids, "errors": {}, "tests": sum(folders.values())}}


def everything(**folders: int) -> list[Any]:
    proofs = proof_parts(listed(**folders), device="cuda")
    return main_parts(proofs, device="cuda", size="1.3B", facts=H100)


def test_every_marked_test_of_this_run_is_in_a_file_that_the_proofs_collect(request: pytest.FixtureRequest) -> None:
    marked = {item.path for item in request.session.items if item.get_closest_marker("cuda") is not None}
    assert marked <= set(candidates(TESTS))


def test_a_folder_of_some_tests_is_a_part_and_few_tests_share_one() -> None:
    found, *parts = proof_parts(listed(launcher=12, runtime__memory=10, runtime__mesh=9, e2e=1), device="cuda")
    assert found.name == "proofs found"
    assert [part.name for part in parts] == ["proofs runtime/memory", "proofs launcher", "proofs elsewhere"]
    files = [word for part in parts for word in part.argv if word.endswith(".py")]
    assert sorted(files) == sorted(
        str(TESTS / folder / "test_a.py") for folder in ("launcher", "runtime/memory", "runtime/mesh", "e2e")
    )


def test_the_row_of_the_listing_has_numbers_in_place_of_names() -> None:
    found, *_ = proof_parts(listed(launcher=9, e2e=1), device="cuda")
    assert found.row({})["result"]["folders"] == {"launcher": 9, "e2e": 1}


def test_where_the_tests_could_not_be_listed_files_are_taken_by_their_text() -> None:
    found, *parts = proof_parts({"state": "failed", "why": "ended by SIGABRT"}, device="cuda")
    assert (found.row({})["state"], found.row({})["why"]) == ("failed", "ended by SIGABRT")
    files = {word for part in parts for word in part.argv if word.endswith(".py")}
    assert files == set(map(str, candidates(TESTS)))


def test_what_runs_by_default_fits_eight_minutes_and_the_proofs_three() -> None:
    parts = everything(runtime__mesh=50, runtime__activation=50, runtime__engine=90, runtime__optim=30, e2e=30)
    assert estimate_s(chosen(parts, ())) <= 8 * 60
    assert 60 <= estimate_s(chosen(parts, ("proofs",))) <= 3 * 60


def test_proofs_come_first_then_parity_then_figures() -> None:
    names = [part.name.split()[0] for part in chosen(everything(runtime__memory=9), ())]
    assert list(dict.fromkeys(names)) == ["probe", "proofs", "parity", "buses", "overhead", "llama"]


def test_no_part_is_ended_before_it_has_taken_what_it_probably_takes() -> None:
    parts = [part for part in everything(runtime__memory=9, e2e=1) if isinstance(part, Part)]
    assert [part.name for part in parts if part.limit_s < part.estimate_s] == []
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
