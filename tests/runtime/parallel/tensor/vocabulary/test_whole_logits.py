"""Logits of which each rank has a part look whole without a word between ranks, and are gathered once when used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart
from dsrun.runtime.parallel.tensor.vocabulary.whole_logits import LABEL, WholeLogits, whole_when_used

VOCAB = 7


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def part_of(axis: LoopbackCollectives) -> VocabularyPart:
    low, more = divmod(VOCAB, axis.size)
    start = axis.rank * low + min(axis.rank, more)
    return VocabularyPart(axis, start, start + low + (axis.rank < more), VOCAB)


def on_ranks(size: int, body: Callable[[Tensor, Tensor, LoopbackCollectives], Any], **more: Any) -> list[Any]:
    """Runs a body with the logits of a rank, and with what they are a part of."""

    def rank(axis: LoopbackCollectives) -> Any:
        part = part_of(axis)
        leaf = values(**more)[..., part.start : part.stop].clone().requires_grad_()
        return body(whole_when_used(leaf * 1.0, part), leaf, axis)

    return LoopbackWorld(size).run(rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_a_tensor_looks_like_is_known_without_a_collective(dtype: torch.dtype) -> None:
    plain = values(dtype).requires_grad_() * 1.0

    def look(x: Tensor) -> list[Any]:
        still = x.detach()
        return [
            *(x.shape, x.dtype, x.device, x.layout, x.ndim, x.dim(), x.size(), x.size(-1), x.numel(), len(x)),
            *(x.stride(), x.is_contiguous(), x.is_floating_point(), x.element_size(), x.nbytes, x.requires_grad),
            *(x.is_leaf, x.grad_fn is not None, x.is_cuda, still.requires_grad, still.shape, x.data.shape),
        ]

    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> None:
        assert look(logits) == look(plain)
        assert isinstance(logits, Tensor)
        shown = f"WholeLogits(shape=(2, 3, 7), dtype={dtype}, gathered over ranks when used)"
        assert (repr(logits), f"{logits}", str(logits.detach())) == (shown, shown, shown)
        assert not axis.traffic.calls

    on_ranks(2, body, dtype=dtype)


USES: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "item access": lambda x: x[0, 1],
    "ellipsis": lambda x: x[..., :-1, :],
    "mask": lambda x: x[x > 0],
    "function": lambda x: torch.logsumexp(x, -1),
    "functional": lambda x: F.softmax(x, -1),
    "loss": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(6)),
    "left": lambda x: x * 2,
    "right": lambda x: 2 - x,
    "both": lambda x: x + x.detach(),
    "compare": lambda x: x == 0,
    "list": lambda x: torch.stack([x, x]),
    "keyword": lambda x: torch.add(input=x, other=x),
    "detach": lambda x: x.detach() + 0,
    "data": lambda x: x.data.square(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float16),
    "cpu": lambda x: x.cpu() + 0,
    "number": lambda x: float(x.detach()[0, 0, 0]),
    "item": lambda x: x.detach()[1, 2, 3].item(),
    "tolist": lambda x: x.detach().tolist(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "asarray": lambda x: torch.from_numpy(np.asarray(x.detach()).copy()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "save": lambda x: saved({"logits": x})["logits"],
    "iteration": lambda x: x.unbind(),
    "rows": lambda x: [*iter(x)],
    "expand": lambda x: x.expand(4, 2, 3, VOCAB) * 1,
    "out": lambda x: torch.exp(x.detach(), out=torch.empty_like(x)),
    "in place": lambda x: x.mul_(3),
    "in place of a view": lambda x: (x[..., 0].zero_(), x + 0),
    "storage": lambda x: x.detach().untyped_storage().nbytes(),
    "zeros like": lambda x: torch.zeros_like(x),
    "inference": lambda x: inferred(x),
    "autocast": lambda x: mixed(x),
    "compiled": lambda x: torch.compile(torch.logsumexp, backend="eager")(x.detach(), -1),
}


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.argmax(-1)


def mixed(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x.float() @ torch.ones(VOCAB, 2)


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_use_gathers_once_and_gives_what_whole_logits_give(name: str, size: int) -> None:
    expected = USES[name](values().requires_grad_() * 1.0)

    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> None:
        found = USES[name](logits)
        if isinstance(expected, Tensor):
            assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
        torch.testing.assert_close(_bare(found), _bare(expected), rtol=0, atol=0)
        assert axis.traffic.calls == {"all_gather": 1}
        assert logits.sum().isfinite()
        assert repr(logits).startswith("tensor(")
        assert axis.traffic.calls == {"all_gather": 1}, "kept"

    on_ranks(size, body)


def _bare(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().resolve_conj() + 0
    return [_bare(one) for one in found] if isinstance(found, tuple | list) else found


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "after a use without gradients": lambda x: (1 + inferred(x).sum().clone()) * x.logsumexp(-1).square().mean(),
    "a function of its own": lambda x: Twice.apply(x).tanh().sum(),  # type: ignore[no-any-return,no-untyped-call]
    "a changed view": lambda x: (x[..., 0].zero_(), x.exp().sum())[1],
    "a change in place": lambda x: x.mul_(2).square().sum(),
    "one row": lambda x: x[0, 1].softmax(-1)[4],
    "a copy": lambda x: x.clone().sigmoid().sum() + x.detach().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_the_parts_of_those_of_whole_logits(name: str, size: int) -> None:
    whole = values().requires_grad_()
    expected = LOSSES[name](whole * 1.0)
    expected.backward()
    assert whole.grad is not None

    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> Tensor:
        loss = LOSSES[name](logits)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-14, atol=0)
        loss.backward()
        assert axis.traffic.calls == {"all_gather": 1}, "backward has all it needs"
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(torch.cat(on_ranks(size, body), -1), whole.grad, rtol=1e-14, atol=0)


def test_what_torch_refuses_of_tensors_with_a_history_it_refuses_here() -> None:
    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> None:
        with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
            logits.numpy()
        with pytest.raises(RuntimeError, match="support the deepcopy protocol"):
            copy.deepcopy(logits)

    on_ranks(2, body)


def test_hooks_and_gradients_of_the_logits_themselves_are_there() -> None:
    whole = values().requires_grad_()
    whole.square().sum().backward()

    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> None:
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        logits.retain_grad()
        logits.square().sum().backward()
        for grad in (*seen, logits.grad):
            assert grad is not None
            assert torch.equal(grad, whole.grad)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    on_ranks(2, body)


def test_the_wait_has_the_name_of_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    own = LoopbackCollectives.all_gather

    def all_gather(self: Any, *args: Any, label: str = "") -> Any:
        labels.append(label)
        return own(self, *args, label=label)

    monkeypatch.setattr(LoopbackCollectives, "all_gather", all_gather)
    on_ranks(2, lambda logits, leaf, axis: logits.argmax(-1))
    assert labels == [LABEL] * 2


def test_copies_and_files_hold_plain_tensors() -> None:
    def body(logits: Tensor, leaf: Tensor, axis: LoopbackCollectives) -> None:
        assert isinstance(logits.detach(), WholeLogits)
        for copied in (copy.deepcopy(logits.detach()), saved(logits), pickle.loads(pickle.dumps(logits.detach()))):
            assert type(copied) is Tensor

    on_ranks(2, body)
