"""What a forward and its backward multiply: as many FLOPs as closed forms say, and as then run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dsrun.long_sequence import linear_cross_entropy, tiled
from dsrun.runtime.long_sequence.chunked_loss import LossOptions, chunked_loss
from dsrun.runtime.observe.flops.attention import visible_pairs
from dsrun.runtime.observe.flops.counter import FlopCount, FlopCounter
from dsrun.runtime.observe.flops.products import work_of
from support.models import CONTEXT, VOCAB, AdaptedBlock, TinyGPT
from support.ran_flops import RanFlops

TOKENS = 2 * CONTEXT
#: Pairs of a causal mask, of a head.
PAIRS = CONTEXT * (CONTEXT + 1) // 2


def counted(run: Callable[..., Any], *args: Any, **kwargs: Any) -> FlopCount:
    counter = FlopCounter()
    with counter:
        kept = run(*args, **kwargs)  # a checkpoint knows how much it saved for as long as its graph is there
        count = counter.count()
    del kept
    return count


def ran(run: Callable[..., Tensor], *args: Any) -> int:
    seen = RanFlops()
    with seen, torch.autograd.set_multithreading_enabled(False):
        run(*args).sum().backward()
    return seen.flops


def linears(model: nn.Module) -> int:
    return sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, CONTEXT))


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_has_six_flops_a_parameter_and_token_and_attention_below_its_mask(tied: bool) -> None:
    model = TinyGPT(tied=tied)
    count = counted(model, tokens())
    assert count.products.forward == 2 * linears(model) * TOKENS
    assert count.products.model == 3 * count.products.forward
    assert count.attention.forward == 3 * 2 * 2 * 2 * PAIRS * 72
    assert count.attention.model == 3 * count.attention.forward
    assert count.attention.hardware == 3.5 * count.attention.forward
    assert count.not_counted == ()
    assert not count.is_estimated


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_llama_with_grouped_heads_is_counted_by_the_heads_of_queries(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 16}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=kind)
    model = transformers.LlamaForCausalLM(config)
    count = counted(model, input_ids=tokens(), labels=tokens())
    pairs = PAIRS if kind == "sdpa" else CONTEXT**2  # a mask that is a tensor says nothing
    attention = 2 * 2 * 2 * 2 * pairs * 64
    rotary = 2 * 2 * 8 * CONTEXT  # angles of positions, a product without gradients
    assert count.total.forward == pytest.approx(2 * linears(model) * TOKENS + attention + rotary, rel=0.01)
    assert count.total.model == pytest.approx(3 * (2 * linears(model) * TOKENS + attention), rel=0.01)
    assert count.not_counted == ()


def test_frozen_weights_and_inputs_without_gradients_have_no_products_in_backward() -> None:
    block = AdaptedBlock(32, 4)
    rows = 2 * 5
    base, low = linears(block) - 2 * 4 * 32, 4 * 32
    first = counted(block, torch.randn(2, 5, 32)).products
    assert first.forward == 2 * rows * linears(block)
    # The input of the block needs no gradient: nothing of the frozen path does, and of the adapters the weights alone.
    assert first.model - first.forward == 2 * rows * (2 * low + low)
    inner = counted(block, torch.randn(2, 5, 32, requires_grad=True)).products
    assert inner.model - inner.forward == 2 * rows * (base + 4 * low)


def test_experts_count_for_the_tokens_they_are_given() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 8, bias=False)
            self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))

        def forward(self, x_ND: Tensor) -> Tensor:
            chosen_NK = self.router(x_ND).topk(2).indices
            out = torch.zeros_like(x_ND)
            for number, expert in enumerate(self.experts):
                rows = (chosen_NK == number).any(dim=1).nonzero().squeeze(1)
                out = out.index_add(0, rows, expert(x_ND[rows]))
            return out

    count = counted(Experts(), torch.randn(40, 16))
    assert count.total.forward == 2 * 40 * (16 * 8 + 2 * 16 * 16)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("left", [None, 0, 2])
@pytest.mark.parametrize("right", [None, 0, 1])
@pytest.mark.parametrize("at_end", [False, True])
def test_visible_pairs_are_those_of_the_mask(
    queries: int, keys: int, left: int | None, right: int | None, at_end: bool
) -> None:
    offset = keys - queries if at_end else 0
    by_hand = sum(
        (left is None or j - i - offset >= -left) and (right is None or j - i - offset <= right)
        for i in range(queries)
        for j in range(keys)
    )
    assert visible_pairs(queries, keys, left=left, right=right, offset=offset) == by_hand


def test_packed_sequences_count_their_own_lengths() -> None:
    q = torch.zeros(9, 2, 4)
    given = {"query": q, "key": q, "value": q, "cum_seq_q": torch.tensor([0, 2, 9]), "is_causal": True}
    work = work_of("aten::_flash_attention_forward", given, None)
    assert work is not None
    assert work.forward == 2 * 2 * 2 * 4 * (3 + 28)
    names = {"q": q, "k": q, "v": q, "cu_seqlens_q": torch.tensor([0, 2, 9]), "cu_seqlens_k": torch.tensor([0, 2, 9])}
    window = {"causal": True, "window_size_left": 1, "window_size_right": 0}
    work = work_of("flash_attn::_flash_attn_varlen_forward", {**names, **window}, None)
    assert work is not None
    assert work.forward == 2 * 2 * 2 * 4 * (3 + 13)


def test_torchs_counter_agrees_where_attention_is_made_of_products() -> None:
    model = TinyGPT()
    x = tokens()
    theirs = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with theirs:
            model(x).sum().backward()
        ours = counted(model, x).total
    assert ours.model == theirs.get_total_flops()
    fused = counted(model, x)
    whole = CONTEXT**2 / PAIRS
    assert fused.products.model + fused.attention.model * whole == pytest.approx(ours.model)


def stacked(model: Any, x: Tensor, **options: Any) -> Tensor:
    """The model with each of its blocks in a checkpoint."""
    y = model.embed(x) + model.position
    for block in model.blocks:
        y = checkpoint(block, y, **options)
    return model.head(model.norm(y))


KEEPS_PRODUCTS = partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)


@pytest.mark.parametrize(
    "options",
    [
        None,
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "early_stop": False},
        {"use_reentrant": False, "context_fn": KEEPS_PRODUCTS},
    ],
)
def test_the_hardwares_flops_are_what_runs(options: dict[str, Any] | None) -> None:
    model = TinyGPT()
    x = tokens()
    run = model if options is None else partial(stacked, model, **options)
    assert counted(run, x).total.hardware == ran(run, x)
    assert counted(run, x).total.model == counted(model, x).total.model


def test_a_product_in_a_custom_function_has_a_backward_where_its_inputs_need_one() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x.detach().double() @ weight.detach().double().t()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None

    weight = torch.randn(4, 8, requires_grad=True)
    needs, without = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    forward = 2 * 3 * 4 * 8
    assert counted(Product.apply, needs, weight).total.model == 3 * forward
    assert counted(Product.apply, without, weight).total.model == 2 * forward
    assert counted(Product.apply, without, weight.detach()).total.model == forward
    with torch.no_grad():
        assert counted(torch.mm, needs, weight.t()).total.model == forward


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_in_chunks_counts_its_products_once(reduction: Literal["mean", "none"]) -> None:
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    targets = torch.randint(0, VOCAB, (12,))
    options = LossOptions(
        reduction=reduction, ignore_index=-100, label_smoothing=0.0, softcap=None, chunk=5, compute=torch.bfloat16
    )
    count = counted(chunked_loss, hidden, weight, None, targets, options).total
    logits = 2 * 12 * 8 * VOCAB
    assert (count.forward, count.model) == (logits, 3 * logits)
    assert count.hardware == (3 if reduction == "mean" else 4) * logits


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torchs_own_loss_of_a_linear_layer_counts_its_products_once(reduction: Literal["mean", "none"]) -> None:
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    targets = torch.randint(0, VOCAB, (12,))
    count = counted(linear_cross_entropy, hidden, weight, targets, kernel="torch", reduction=reduction)
    logits = 2 * 12 * 8 * VOCAB
    assert (count.total.forward, count.total.model, count.not_counted) == (logits, 3 * logits, ())
    assert count.total.hardware == (3 if reduction == "mean" else 4) * logits


def test_gradients_that_a_loss_of_liger_makes_are_of_its_backward() -> None:
    class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = hidden @ weight.t()
            torch.softmax(logits, -1, out=logits)  # its kernel writes the gradient there
            return (logits @ weight).sum() + (logits.t() @ hidden).sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, None

    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    count = counted(LigerFusedLinearCrossEntropyFunction.apply, hidden, weight).total
    assert (count.forward, count.model) == (2 * 12 * 8 * VOCAB, 6 * 12 * 8 * VOCAB)


def test_tiles_run_again_in_backward() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(2, 6, 8, requires_grad=True)
    run = partial(tiled, module, tile_size=2)
    count = counted(run, x).total
    assert count.model == counted(module, x).total.model
    assert count.hardware == ran(run, x) == count.model + count.forward


def test_convolutions_count_each_position_once_and_their_backward_by_operands() -> None:
    x = torch.randn(2, 4, 9, 9)
    for layer, positions in ((nn.Conv2d(4, 6, 3, groups=2), 49), (nn.ConvTranspose2d(4, 6, 3), 81)):
        count = counted(layer, x).total
        assert count.forward == 2 * 2 * positions * layer.weight.numel()
        assert count.model == 2 * count.forward


def _product(x: Tensor) -> Tensor:
    return x @ x.t()


def test_what_is_not_counted_is_named_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm = nn.LSTM(4, 4)
    assert counted(lstm, torch.randn(3, 2, 4)).not_counted == ("aten::mkldnn_rnn_layer",)
    library = torch.library.Library("flops_test", "DEF")
    library.define("product(Tensor x) -> Tensor")
    library.impl("product", _product, "CPU")
    own: Any = torch.ops.flops_test.product
    assert counted(own, torch.randn(3, 3)).not_counted == ("flops_test::product",)

    def fails(*_: Any) -> Any:
        raise ValueError("as told")

    monkeypatch.setattr("dsrun.runtime.observe.flops.counter.work_of", fails)
    assert "aten::mm (ValueError)" in counted(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).not_counted


def test_counting_compiles_nothing_else_and_changes_no_compiled_result() -> None:
    compiles: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(len(inputs))
        return graph.forward

    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4)
    torch.compiler.reset()

    def compiled(x: Tensor) -> Tensor:
        return torch.sin(x @ weight).sum()

    run = torch.compile(compiled, backend=backend)
    first = counted(run, x).total.model
    assert len(compiles) == 1
    assert torch.equal(run(x), run(x))
    assert len(compiles) == 1
    assert first == 2 * 2 * 3 * 4 * 4
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_counts_the_blocks_of_its_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, kv = torch.randn(1, 4, 256, 16), torch.randn(1, 2, 256, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    count = counted(flex_attention, q, kv, kv, block_mask=mask, enable_gqa=True)
    assert count.attention.forward == 2 * 2 * 4 * 16 * (64 * 64 * 10)
    count = counted(flex_attention, q, kv, kv, enable_gqa=True)
    assert count.attention.forward == 2 * 2 * 4 * 16 * 256 * 256
