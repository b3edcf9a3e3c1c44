"""Which code computes a loss: the choice, by itself and by name, and how many tokens it takes at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsrun.errors import ModelError
from dsrun.runtime.long_sequence.loss_kernels import LossCall, LossKernel, choose_kernel, loss_bytes, tokens_at_a_time

ON_CPU = LossCall(device_type="cpu", reduction="mean", label_smoothing=0.0, softcap=None)
ON_GPU = replace(ON_CPU, device_type="cuda")
ALL: dict[LossKernel, bool] = {"torch": True, "liger": True}
NONE: dict[LossKernel, bool] = {"torch": False, "liger": False}


@pytest.mark.parametrize(
    ("call", "installed", "kernel"),
    [
        (ON_CPU, ALL, "chunks"),
        (ON_GPU, ALL, "liger"),
        (ON_GPU, NONE, "chunks"),
        (replace(ON_GPU, reduction="none"), ALL, "chunks"),
        (replace(ON_GPU, softcap=30.0), ALL, "liger"),
        (replace(ON_GPU, is_cut=True), ALL, "chunks"),
    ],
)
def test_the_choice_by_itself(call: LossCall, installed: dict[LossKernel, bool], kernel: str) -> None:
    assert choose_kernel("auto", call, installed=installed) == kernel


def test_a_name_is_followed_where_it_can_be() -> None:
    assert choose_kernel("chunks", ON_GPU, installed=ALL) == "chunks"
    assert choose_kernel("torch", ON_CPU, installed=ALL) == "torch"
    assert choose_kernel("liger", ON_GPU, installed=ALL) == "liger"


@pytest.mark.parametrize(
    ("asked", "call", "installed", "words"),
    [
        ("liger", ON_GPU, NONE, "kernel='liger' is not installed"),
        ("torch", ON_CPU, NONE, "kernel='torch' is not installed"),
        ("liger", ON_CPU, ALL, "cannot compute on cpu; it needs CUDA"),
        ("liger", replace(ON_GPU, reduction="none"), ALL, "cannot compute reduction='none'"),
        ("torch", replace(ON_CPU, softcap=2.0), ALL, "cannot compute a softcap"),
        ("torch", replace(ON_CPU, label_smoothing=0.1), ALL, "cannot compute label smoothing"),
        ("torch", replace(ON_GPU, is_cut=True), ALL, "cannot compute a vocabulary that is cut over ranks"),
        ("liger", replace(ON_GPU, is_cut=True), ALL, "cannot compute a vocabulary that is cut over ranks"),
        ("lager", ON_CPU, ALL, "kernel is 'lager'; expected 'auto', 'chunks', 'torch' or 'liger'"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    asked: LossKernel, call: LossCall, installed: dict[LossKernel, bool], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        choose_kernel(asked, call, installed=installed)


def test_a_missing_liger_names_the_line_that_installs_it() -> None:
    with pytest.raises(ModelError) as caught:
        choose_kernel("liger", ON_GPU, installed=NONE)
    assert "pip install liger-kernel" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("tokens", "width", "vocab", "chunk"),
    [
        (8192, 4096, 128256, 512),  # 8192 x 4096 / 128256 = 261.6
        (8192, 4096, 32000, 2048),
        (1024, 64, 50000, 128),  # never fewer, for thin products cost more than they save
        (100, 64, 50000, 100),
        (4096, 512, 100, 4096),
        (0, 64, 100, 1),
    ],
)
def test_a_chunk_has_logits_about_as_large_as_the_hidden_states(
    tokens: int, width: int, vocab: int, chunk: int
) -> None:
    assert tokens_at_a_time(tokens, width, vocab) == chunk


def test_chunks_of_llama_3_take_a_quarter_of_whole_logits() -> None:
    taken = loss_bytes(8192, 4096, 128256, size=2, chunk=512)
    whole = 8192 * 128256 * 12
    assert taken.kept == 2 * 4096 * (8192 + 128256)
    assert taken.forward == 2 * 4096 * 8192 + 4 * 4096 * 128256 + max(512 * 128256 * 14, 2 * 4096 * 128256)
    assert taken.forward < 0.26 * whole
