"""The compiled pass gives the bits of torch's fused kernel, and is not taken where it does not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.errors import DsrunError, InputError
from dsrun.runtime.offload.states.split_master import join_master, split_master
from dsrun.runtime.offload.step import build_pass as building
from dsrun.runtime.offload.step.build_pass import build_pass, built_pass
from dsrun.runtime.offload.step.compiled_adam import CompiledAdam, load_pass
from dsrun.runtime.offload.step.torch_adam import AdamBlocks
from dsrun.runtime.offload.step.ways import BlockStep, RangeWork, block_step_for

has_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
#: More than one share of each of three threads, the last one shorter.
NUMEL = 3 * (1 << 15) + 64
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam, coupled": {"weight_decay": 0.1, "decoupled_weight_decay": False},
    "no decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1, "decoupled_weight_decay": False},
    "short memory": {"betas": (0.3, 0.5), "eps": 1e-3},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pass(tmp_path_factory.mktemp("built"))


class Never:
    """Nobody asks for it."""

    def step(self, work: RangeWork) -> None:
        raise AssertionError("the compiled pass was not taken")


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    leaf = nn.Parameter(torch.zeros(1))
    return optim.Adam([leaf], lr=1e-2, fused=True, **{"decoupled_weight_decay": True, **given}).param_groups[0]


def values(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@has_compiler
@pytest.mark.parametrize("out", [torch.bfloat16, None])
@pytest.mark.parametrize("grads", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_torchs_fused_kernel(library: Path, name: str, grads: torch.dtype, out: torch.dtype | None) -> None:
    ways = [
        CompiledAdam(load_pass(library), Never(), threads=3),
        AdamBlocks(1 << 14, threads=1),
    ]
    written: list[dict[str, Any]] = []
    for way in ways:
        master, params = values(0), None if out is None else torch.empty(NUMEL, dtype=out)
        states: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        for step in range(3):
            scale = 1.0 if step == 1 else 0.37
            work = RangeWork(
                master, values(step + 1).to(grads), states, scalars, options_of(OPTIONS[name]), scale, params
            )
            way.step(work)
        written.append({"master": master, **({} if params is None else {"out": params}), **states, **scalars})
    assert written[0].keys() == written[1].keys()
    for key, value in written[0].items():
        assert torch.equal(value, written[1][key]), key


@has_compiler
def test_parameters_may_be_written_where_the_gradients_are(library: Path) -> None:
    way = CompiledAdam(load_pass(library), Never(), threads=2)
    masters, apart, grads = [values(0), values(0)], torch.empty(NUMEL, dtype=torch.bfloat16), values(1).bfloat16()
    way.step(RangeWork(masters[0], grads.clone(), {}, {}, options_of({}), 0.37, apart))
    way.step(RangeWork(masters[1], grads, {}, {}, options_of({}), 0.37, grads))
    assert torch.equal(grads, apart)
    assert torch.equal(*masters)


@has_compiler
def test_nan_and_infinity_come_out_where_torch_has_them(library: Path) -> None:
    found: list[list[Tensor]] = []
    for way in (CompiledAdam(load_pass(library), Never(), threads=1), AdamBlocks(256, threads=1)):
        master, out = torch.zeros(256), torch.empty(256, dtype=torch.bfloat16)
        grads = torch.zeros(256)
        grads[3], grads[5], grads[7], master[9] = float("nan"), float("inf"), -1e30, 3e38
        states: dict[str, Tensor] = {}
        way.step(RangeWork(master, grads, states, {}, options_of({"amsgrad": True}), 1.0, out))
        found.append([master, out, *states.values()])
    for ours, torchs in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), torchs.isnan())
        assert torch.equal(ours.nan_to_num(1.0, 2.0, 3.0), torchs.nan_to_num(1.0, 2.0, 3.0))


@has_compiler
def test_what_it_has_no_loop_for_is_left_to_torch(library: Path) -> None:
    whole, tail = values(0), values(0)[:300]
    narrow = {"exp_avg": torch.zeros(NUMEL, dtype=torch.bfloat16)}
    blocks = AdamBlocks(1 << 14, threads=1)
    ways: list[BlockStep] = [CompiledAdam(load_pass(library), blocks, threads=1), blocks]
    for values_N, dtype, made in (
        (whole, torch.float16, {}),
        (tail, torch.float32, {}),
        (whole, torch.float32, narrow),
    ):
        masters = [values_N.clone() for _ in ways]
        for way, master in zip(ways, masters, strict=True):
            states = {name: state.clone() for name, state in made.items()}
            grads = values(1)[: len(values_N)].to(dtype)
            way.step(RangeWork(master, grads, states, {}, options_of({})))
        assert torch.equal(*masters)
    halves, master = split_master(whole), whole.clone()
    ways[0].step(RangeWork(halves, values(1), {}, {}, options_of({})))
    ways[1].step(RangeWork(master, values(1), {}, {}, options_of({})))
    assert torch.equal(join_master(halves), master)


@has_compiler
def test_a_library_of_other_bits_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = build_pass()
    # One rounding less than torch's kernel has.
    source = tmp_path / "other.cpp"
    source.write_text(
        building.SOURCE.read_text().replace("fmaf(share, g - m0, near_mean ? m0 : g)", "m0 + share * (g - m0)")
    )
    subprocess.run(["c++", "-O3", "-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(DsrunError, match="gives other bits than torch"):
        load_pass(path)
    stepper = block_step_for(optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True))
    assert isinstance(stepper, AdamBlocks)
    assert "runs through torch" in caplog.text


@has_compiler
def test_it_is_taken_where_it_was_built_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    assert built_pass() is None
    assert isinstance(block_step_for(optimizer), AdamBlocks)
    assert not list(tmp_path.iterdir()), "nothing is built but on purpose"
    assert building.main([]) == 0
    assert isinstance(block_step_for(optimizer), CompiledAdam)
    assert isinstance(block_step_for(optimizer, compiled=False), AdamBlocks)
    assert building.main(["--remove"]) == 0
    assert isinstance(block_step_for(optimizer), AdamBlocks)


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no C\+\+ compiler among no-such-compiler"):
        build_pass(tmp_path, compiler="no-such-compiler")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'adam_pass.cpp:1: out of ideas' >&2\nexit 3\n")
    compiler.chmod(0o755)
    with pytest.raises(DsrunError, match=r"(?s)exited with 3:.*out of ideas"):
        build_pass(tmp_path / "built", compiler=str(compiler))
    assert not list((tmp_path / "built").iterdir())


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "adam_pass.so"
    path.write_text("no ELF")
    with pytest.raises(DsrunError, match=r"adam_pass\.so"):
        load_pass(path)
