"""Chunks of plain models give the bits of the whole model, run one after the other in one thread."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import ConfigError, ModelError
from dsrun.runtime.parallel.pipeline.cut import cut_model
from dsrun.runtime.stacks import AbsentBlock
from support.chunk_by_chunk import Batch, cut_on_ranks, different, grads_of
from support.model_families import FAMILIES
from support.models import VOCAB, Block, TinyGPT, loss_of

#: Rank of each chunk: p 1, 2, 4; two chunks a rank; a V.
PLACES = [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)]
SEVERAL = PLACES[1:]
WIDTH = 72


def tokens(*, length: int = 8, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, (2, length), generator=torch.Generator().manual_seed(seed))


def made(cls: Any, *args: Any, seed: int = 1, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def gpt_example() -> Any:
    path = Path(__file__).parents[4] / "scripts" / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(width=32, heads=4, layers=4, context=16)


def assert_equal(model: nn.Module, batch: Batch, rank_of: tuple[int, ...], loss: Any, **given: Any) -> None:
    """Loss, output and all gradients of the cut model have the bits of the whole one."""
    chunks = cut_on_ranks(model, rank_of, **given)
    output = model(*batch[0], **batch[1])
    loss(output).backward()
    found = chunks.run(batch, loss_of=loss)
    assert torch.equal(loss(output), loss(found))
    assert different(grads_of(model), chunks.grads()) == []


@pytest.mark.parametrize("rank_of", PLACES, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_have_the_bits_of_the_whole_model(rank_of: tuple[int, ...], tied: bool, dtype: torch.dtype) -> None:
    model = made(TinyGPT, layers=4, tied=tied).to(dtype)
    ids = tokens()
    assert_equal(model, ((ids,), {}), rank_of, lambda logits: loss_of(logits, ids))


@pytest.mark.parametrize("rank_of", PLACES, ids=str)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 3", "OPT", "Falcon", "Mamba"])
def test_models_of_hugging_face_are_cut_without_edits(rank_of: tuple[int, ...], name: str) -> None:
    pytest.importorskip("transformers")
    if name == "Mamba" and len(rank_of) > 2:
        pytest.skip("two layers")
    torch.manual_seed(1)
    model = FAMILIES[name].make().train()
    if len(rank_of) > 2:
        model = deeper(model)
    ids = tokens(vocab=64)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    assert_equal(model, ((), {**given, "attention_mask": mask}), rank_of, lambda output: output.loss)
    model.zero_grad()
    assert_equal(model.to(torch.bfloat16), ((), given), rank_of, lambda output: output.loss)


def deeper(model: Any) -> nn.Module:
    """Returns a model of the same class with four layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types]
    return type(model)(config).train()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_sums_over_ragged_micro_batches_have_the_same_bits_wherever_the_model_is_cut(tied: bool) -> None:
    model = made(TinyGPT, layers=4, tied=tied)
    sums: list[Any] = []
    for rank_of in PLACES:
        chunks = cut_on_ranks(model, rank_of)
        for micro, length in enumerate((8, 5, 11, 8)):
            ids = tokens(length=length, seed=micro)
            chunks.run(((ids,), {}), loss_of=lambda logits, ids=ids: loss_of(logits, ids) / 4)
            with torch.no_grad():
                chunks.run(((ids[:, :3],), {}), loss_of=None)
        sums.append(chunks.grads())
    for other in sums[1:]:
        assert different(sums[0], other) == []


@pytest.mark.parametrize("rank_of", PLACES, ids=str)
def test_a_tied_parameter_is_one_of_its_own_for_each_end(rank_of: tuple[int, ...]) -> None:
    chunks = cut_on_ranks(made(TinyGPT, layers=4, tied=True), rank_of)
    tied = [tied for stages in chunks.stages for tied in stages.tied]
    last = len(rank_of) - 1
    assert [one.name for one in tied] == ["embed.weight"] * 2
    assert {one.chunk for one in tied} == {0, last}
    assert all(one.chunks == tuple(sorted({0, last})) for one in tied)
    assert tied[0].param is not tied[1].param
    assert torch.equal(tied[0].param, tied[1].param)
    assert tied[0].param.data_ptr() != tied[1].param.data_ptr()


class ReadTwice(TinyGPT):
    """Reads the embedding's weight for its logits: one place of a parameter, used on both sides."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        del self.head

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


@pytest.mark.parametrize("rank_of", PLACES, ids=str)
def test_a_parameter_that_is_read_on_both_sides_is_tied(rank_of: tuple[int, ...]) -> None:
    ids = tokens()
    assert_equal(made(ReadTwice), ((ids,), {}), rank_of, lambda logits: loss_of(logits, ids))


@pytest.mark.parametrize("rank_of", SEVERAL, ids=str)
def test_the_example_and_plain_sequentials_are_cut(rank_of: tuple[int, ...]) -> None:
    ids = tokens(vocab=256)
    assert_equal(gpt_example(), ((ids,), {}), rank_of, lambda logits: loss_of(logits, ids))
    numbers = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    blocks = made(lambda: nn.Sequential(*(Block(WIDTH, 4) for _ in range(4))))
    assert_equal(blocks, ((numbers,), {}), rank_of, lambda output: output.square().mean())
    whole = made(
        lambda: nn.Sequential(
            nn.Embedding(VOCAB, WIDTH),
            *(Block(WIDTH, 4) for _ in range(4)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )
    )
    ids = tokens()
    assert_equal(whole, ((ids,), {}), rank_of, lambda logits: loss_of(logits, ids))


class Recurrent(nn.Module):
    """A block of another class, for stacks of several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cumsum(self.inside(self.norm(x)), 1) / 8


class Hybrid(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[1], self.blocks[2] = Recurrent(), Recurrent()


class Between(TinyGPT):
    """Calls a module between the second block and the third."""

    def __init__(self, *, often: bool = False) -> None:
        super().__init__(layers=4)
        self.middle = nn.LayerNorm(WIDTH)
        self.often = often

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.often or number == 1:
                x = self.middle(x)
        return self.head(self.norm(x))


class Tuples(TinyGPT):
    """Blocks return tuples, take hidden states by name, and have what model code reads from them."""

    class Wrapped(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.kind = "even" if number % 2 == 0 else "odd"
            self.inner = Block(WIDTH, 4)

        def forward(self, *, scale: float, hidden_states: Tensor) -> tuple[Tensor, None, Tensor]:
            out = self.inner(hidden_states) * scale
            return out, None, out.sum()

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.blocks = nn.ModuleList(self.Wrapped(number) for number in range(4))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(hidden_states=x, scale=0.5 if block.kind == "odd" else 2.0)[0] * 1.5
        return self.head(self.norm(x))


@pytest.mark.parametrize("rank_of", SEVERAL, ids=str)
@pytest.mark.parametrize("cls", [Hybrid, Between, Tuples])
def test_stacks_of_several_kinds_and_code_between_blocks_run_once(rank_of: tuple[int, ...], cls: Any) -> None:
    ids = tokens()
    assert_equal(made(cls), ((ids,), {}), rank_of, lambda logits: loss_of(logits, ids))


def test_a_module_between_blocks_of_several_chunks_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"`middle.weight` is used between blocks of `blocks` in several chunks"):
        cut_model(Between(often=True), rank=0, rank_of=(0, 1))


class Beside(TinyGPT):
    """Blocks are given something made of parameters beside their hidden states."""

    class Mixed(Block):
        def forward(self, x_BTD: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x_BTD + first)

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.blocks = nn.ModuleList(self.Mixed(WIDTH, 4) for _ in range(4))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = first = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x, first)
        return self.head(self.norm(x))


def test_what_goes_beside_hidden_states_is_refused_by_name_on_both_sides() -> None:
    chunks = cut_on_ranks(Beside(), (0, 1))
    with pytest.raises(ModelError, match=r"argument 1 of `blocks.2`, of shape \(2, 8, 72\), carries gradients"):
        chunks.run(((tokens(),), {}), loss_of=None)
    received = {"hidden": torch.zeros(2, 8, WIDTH, requires_grad=True), "form": [None, []]}
    with pytest.raises(ModelError, match=r"argument 1 of `blocks.2`"):
        chunks.stages[1].run(1, (tokens(),), {}, received)


def test_without_gradients_a_foreign_value_is_no_number_and_never_a_wrong_one() -> None:
    chunks = cut_on_ranks(Beside(), (0, 1))
    with torch.no_grad():
        assert chunks.run(((tokens(),), {}), loss_of=None).isnan().all()


class Backwards(TinyGPT):
    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = TinyGPT(), TinyGPT()


class SharedBlocks(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[3].up = self.blocks[0].up


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Backwards(layers=4), r"calls blocks of `blocks` in the order blocks.3"),
        (TwoStacks(), r"several stacks of blocks \(`one.blocks`, `two.blocks`\)"),
        (nn.Linear(3, 3), r"a Linear has no stack of blocks"),
        (TinyGPT(layers=1), r"no stack of blocks"),
        (SharedBlocks(), r"`blocks.0.up.weight` and `blocks.3.up.weight` are one parameter"),
    ],
    ids=["backwards", "two stacks", "no stack", "one block", "shared"],
)
def test_what_cannot_be_cut_is_refused_by_name(model: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        cut_model(model, rank=0, rank_of=(0, 1))


def test_more_chunks_than_blocks_and_chunks_without_one_are_refused() -> None:
    with pytest.raises(ModelError, match="`blocks` has 3 blocks for 4 chunks"):
        cut_model(TinyGPT(), rank=0, rank_of=(0, 1, 2, 3))
    for bounds, said in (((0, 0, 3), "give chunk 0 no layer"), ((0, 2, 4), "go from 0 to 4; expected 0 to 3")):
        with pytest.raises(ConfigError, match=f"^`pipeline.partition`: bounds .* {said}"):
            cut_model(TinyGPT(), rank=0, rank_of=(0, 1), partition=bounds)


def test_what_is_collected_over_blocks_is_refused_by_name() -> None:
    pytest.importorskip("transformers")
    stages = cut_model(FAMILIES["Llama"].make(), rank=0, rank_of=(0, 1))
    for name in ("output_hidden_states", "output_attentions", "use_cache"):
        with pytest.raises(ModelError, match=f"`{name}`"):
            stages.run(0, (tokens(vocab=64),), {name: True}, None)


def test_a_rank_has_its_own_parameters_alone_and_names_of_the_whole_model() -> None:
    model = TinyGPT(layers=4)
    names = {name for name, _ in model.named_parameters()}
    foreign = [weakref.ref(param) for param in (*model.blocks[0].parameters(), model.embed.weight, model.position)]
    stages = cut_model(model, rank=1, rank_of=(0, 1))
    gc.collect()
    assert all(ref() is None for ref in foreign)
    assert len(model.blocks) == 4
    assert isinstance(model.blocks[0], AbsentBlock)
    kept = {name for name, _ in model.named_parameters()}
    assert kept < names
    assert {name.partition(".")[0] for name in kept} == {"blocks", "norm", "head"}
    of_chunk = [param for module in stages.modules_of(1) for param in module.parameters()]
    assert {id(param) for param in of_chunk} == {id(param) for param in model.parameters()}
    assert set(model.state_dict()) == kept, "a buffer outside of the stack is the first chunk's"


@pytest.mark.parametrize("rank_of", PLACES, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_each_parameter_is_in_one_chunk(rank_of: tuple[int, ...], tied: bool) -> None:
    for stages in cut_on_ranks(TinyGPT(layers=4, tied=tied), rank_of).stages:
        found = [id(p) for chunk in stages.own for module in stages.modules_of(chunk) for p in module.parameters()]
        assert sorted(found) == sorted(id(param) for param in stages.module.parameters())


def test_a_model_on_the_meta_device_is_cut_without_memory() -> None:
    with torch.device("meta"):
        model = TinyGPT(layers=4, width=8192, vocab=500_000)
    stages = cut_model(model, rank=1, rank_of=(0, 1))
    assert all(param.is_meta for param in model.parameters())
    assert stages.partition.bounds[0] == 0


def test_the_model_is_as_before_when_a_run_is_over_or_has_failed() -> None:
    model = made(TinyGPT, layers=4, tied=True)
    stages = cut_model(model, rank=0, rank_of=(0, 1, 1, 0))
    called: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    children = {name: list(module.children()) for name, module in model.named_modules()}
    stages.run(0, (tokens(),), {}, None)
    assert "blocks.0" in called
    assert "blocks.3" not in called
    assert "head" not in called
    called.clear()
    received = {"hidden": torch.zeros(2, 8, WIDTH, requires_grad=True), "form": [None, []]}
    stages.run(3, (tokens(),), {}, received)
    assert "blocks.3" in called
    assert "blocks.0" not in called
    assert "embed" not in called
    with pytest.raises(IndexError):
        stages.run(0, (torch.full((2, 8), VOCAB + 7),), {}, None)
    assert {name: list(module.children()) for name, module in model.named_modules()} == children
    assert {name: set(vars(module)) for name, module in model.named_modules()} == {
        name: set(values) for name, values in before.items()
    }


def test_dropout_in_front_of_a_chunk_draws_no_random_numbers_where_others_have_it() -> None:
    model = made(TinyGPT, layers=4)
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.5))
    stages = cut_model(model, rank=1, rank_of=(0, 1))
    before = torch.get_rng_state()
    received = {"hidden": torch.zeros(2, 8, WIDTH, requires_grad=True), "form": [None, []]}
    stages.run(1, (tokens(),), {}, received)
    assert torch.equal(before, torch.get_rng_state())


def test_partitions_weigh_the_ends() -> None:
    model = TinyGPT(layers=8, width=32, vocab=2000)
    bounds = {
        method: cut_model(copy.deepcopy(model), rank=0, rank_of=(0, 1), partition=method, sequence_length=8).partition
        for method in ("cost", "parameters", "uniform", "type:block", (0, 3, 8))
    }
    assert bounds["uniform"].bounds == bounds["type:block"].bounds == (0, 4, 8)
    assert bounds["parameters"].bounds == (0, 4, 8)  # embedding and head weigh alike
    assert bounds["cost"].bounds[1] > 4  # the head computes, the embedding does not
    assert bounds[(0, 3, 8)].bounds == (0, 3, 8)
    assert len(bounds["cost"].costs) == 8
    assert bounds["cost"].names[3] == "blocks.3"


def test_the_order_of_calls_says_which_end_a_module_is_in() -> None:
    pytest.importorskip("transformers")
    model: Any = FAMILIES["OPT"].make()
    cut_model(model, rank=0, rank_of=(0, 1))
    names = {name for name, _ in model.named_parameters()}
    assert not any("final_layer_norm" in name and ".layers." not in name for name in names)
    assert "model.decoder.embed_tokens.weight" in names


def test_a_linear_layer_in_front_of_numbers_is_in_the_first_chunk() -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(2))
            self.into, self.out = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for block in self.blocks:
                x = block(x)
            return F.softplus(self.out(x))

    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(2))
    assert_equal(made(Numbers), ((x,), {}), (0, 1), lambda output: output.sum())
