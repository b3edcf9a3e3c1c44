"""`attention` on the CPU: the kernel that runs is the one chosen, results are torch's, and bytes are the formulas'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsrun.choices.attention_kernels import AttentionCall, AttentionKernel, Format, KernelBytes, kernel_bytes
from dsrun.errors import ModelError
from dsrun.long_sequence import attention
from dsrun.runtime.long_sequence.attention import choice_for
from support.allocations import allocations, peak_of
from support.operation_names import OperationNames
from support.ranks import run_ranks


class Watched(OperationNames):
    """Tells by the names of operations which kernel ran."""

    @property
    def kernel(self) -> AttentionKernel:
        """What ran."""
        return "flash" if any("flash" in name for name in self.names) else "math"


def make(
    *, heads: int = 4, kv_heads: int = 4, queries: int = 10, keys: int = 10, value_dim: int = 8, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model has them: [B, L, H, D] seen as [B, H, L, D]."""
    generator = torch.Generator().manual_seed(5)

    def one(count: int, positions: int, width: int) -> Tensor:
        made = torch.randn(2, positions, count, width, generator=generator).to(more.get("dtype", torch.float32))
        return made.transpose(1, 2).requires_grad_()

    return one(heads, queries, 8), one(kv_heads, keys, 8), one(kv_heads, keys, value_dim)


CALLS: list[tuple[dict[str, Any], dict[str, Any], AttentionKernel]] = [
    ({}, {}, "flash"),
    ({}, {"causal": True}, "flash"),
    ({"kv_heads": 2}, {"causal": True}, "flash"),
    ({"keys": 13}, {"causal": True}, "flash"),
    ({"dtype": torch.bfloat16}, {}, "flash"),
    ({"dtype": torch.float64}, {"scale": 0.3}, "flash"),
    ({}, {"mask": torch.ones(10, 10, dtype=torch.bool).tril()}, "flash"),
    ({}, {"mask": torch.zeros(2, 1, 10, 10)}, "flash"),
    ({}, {"mask": torch.zeros(4, 10, 10)}, "math"),
    ({}, {"mask": torch.zeros(10, 10, requires_grad=True)}, "math"),
    ({}, {"dropout": 0.5}, "math"),
    ({"value_dim": 16}, {}, "math"),
    ({"queries": 1}, {}, "flash"),
]


@pytest.mark.parametrize(("shape", "more", "kernel"), CALLS)
def test_what_is_chosen_runs_and_gives_torchs_own_result(
    shape: dict[str, Any], more: dict[str, Any], kernel: AttentionKernel
) -> None:
    q, k, v = make(**shape)
    chosen = {key: value for key, value in more.items() if key != "scale"}
    assert choice_for(q, k, v, **chosen).kernel == kernel
    torch.manual_seed(1)
    with Watched() as watched:
        found = attention(q, k, v, **more)
    assert watched.kernel == kernel
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=more.get("mask"),
        dropout_p=more.get("dropout", 0.0),
        is_causal=more.get("causal", False),
        scale=more.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert torch.equal(found, expected)
    pairs = zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_kernel_by_name_runs_or_says_what_is_in_its_way() -> None:
    q, k, v = make()
    with Watched() as watched:
        attention(q, k, v, kernel="math")
    assert watched.kernel == "math"
    with pytest.raises(ModelError, match="kernel='flash' cannot take this call: dropout"):
        attention(q, k, v, kernel="flash", dropout=0.1)
    with pytest.raises(ModelError, match="kernel='cudnn' cannot take this call: it needs CUDA"):
        attention(q, k, v, kernel="cudnn")
    with pytest.raises(ModelError, match="kernel is 'fast'; expected 'auto', 'flash', 'cudnn'"):
        attention(q, k, v, kernel="fast")  # type: ignore[arg-type]


def test_a_compiler_sees_one_graph() -> None:
    q, k, v = make(kv_heads=2)
    compiled = torch.compile(lambda q: attention(q * 2, k, v, causal=True), backend="eager", fullgraph=True)  # pyright: ignore
    assert torch.equal(compiled(q), attention(q * 2, k, v, causal=True))


def test_mistakes_are_named() -> None:
    q, k, v = make()
    with pytest.raises(ModelError, match="expected four dimensions"):
        attention(q[0], k, v)
    with pytest.raises(ModelError, match=r"queries \[2, 4, 10, 8\], keys \[2, 3, 10, 8\]"):
        attention(q, k[:, :3], v[:, :3])
    with pytest.raises(ModelError, match="do not fit"):
        attention(q, k[:, :, :5], v)
    with pytest.raises(ModelError, match=r"torch.float32, torch.float32 and torch.bfloat16; expected one float"):
        attention(q, k, v.bfloat16())
    with pytest.raises(ModelError, match="mask and causal are both given"):
        attention(q, k, v, mask=torch.ones(10, 10, dtype=torch.bool), causal=True)


B, H, D = 2, 4, 32
#: Kernel, format, K, L, S, causal, dropout.
COUNTED: list[tuple[AttentionKernel, Format, int, int, int, bool, float]] = [
    ("flash", "fp32", 4, 256, 256, True, 0.0),
    ("flash", "bf16", 2, 256, 320, False, 0.0),
    ("flash", "fp64", 2, 128, 192, False, 0.0),
    ("math", "fp32", 4, 256, 256, True, 0.0),
    ("math", "fp32", 2, 256, 320, False, 0.0),
    ("math", "bf16", 4, 256, 320, True, 0.1),
    ("math", "bf16", 2, 256, 256, True, 0.0),
    ("math", "fp32", 4, 256, 256, False, 0.1),
    ("math", "fp64", 2, 128, 128, True, 0.1),
]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
#: Of one thread: a tile of scores and its kin, in fp32 or wider, and beside it in 16 bits.
SCRATCH = 1 << 20


def _keep(made: list[Any], run: Callable[[], Any]) -> None:
    made.append(run())


def _count() -> list[KernelBytes]:
    found: list[KernelBytes] = []
    # What is made under the profiler lives on: it would take a later block at the same address for this one.
    made: list[Any] = []
    for kernel, form, kv_heads, queries, keys, causal, dropout in COUNTED:
        dtype = _DTYPES[form]
        q, k, v = (
            torch.randn(B, positions, heads, D, dtype=dtype).transpose(1, 2).requires_grad_()
            for heads, positions in ((H, queries), (kv_heads, keys), (kv_heads, keys))
        )
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        forward = partial(attention, q, k, v, causal=causal, dropout=dropout, kernel=kernel)
        forward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward()
        del output
        up = peak_of(allocations(partial(_keep, made, forward)))
        output = forward()
        backward = partial(torch.autograd.grad, output, (q, k, v), torch.ones_like(output))
        down = peak_of(allocations(partial(_keep, made, backward)))
        found.append(KernelBytes(sum(saved.values()), up, down))
    return found


def test_bytes_of_the_cpus_kernels_are_those_of_the_formulas() -> None:
    (counted,) = run_ranks(1, _count)
    for (kernel, form, kv_heads, queries, keys, causal, dropout), found in zip(COUNTED, counted, strict=True):
        call = AttentionCall(
            batch=B,
            heads=H,
            kv_heads=kv_heads,
            queries=queries,
            keys=keys,
            head_dim=D,
            dtype=form,
            device_type="cpu",
            causal=causal,
            dropout=dropout,
        )
        expected = kernel_bytes(kernel, call)
        assert found.kept == expected.kept, (kernel, form)
        scratch = 64 if kernel == "math" else SCRATCH
        assert expected.forward <= found.forward <= expected.forward + scratch, (kernel, form)
        assert expected.backward <= found.backward <= expected.backward + scratch, (kernel, form)
