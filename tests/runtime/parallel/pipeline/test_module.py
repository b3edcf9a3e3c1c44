"""A list of layers is cut, built and run the same whatever the stages; names and rules are DeepSpeed's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsrun.errors import DsrunError, ModelError
from dsrun.runtime.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from dsrun.runtime.parallel.pipeline.module import PipelineModule
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from dsrun.runtime.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from dsrun.runtime.stacks import AbsentBlock, find_stacks

WIDTH, WORDS = 32, 7


class Block(nn.Module):
    """A layer with parts, large enough to be a block."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        if self.up.weight.device.type != "meta":
            type(self).built += 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


def scores(embedding: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(embedding.weight, Tensor)
    return x @ embedding.weight.t()


def specs(blocks: int = 4) -> list[Any]:
    """Embedding, blocks, a function and a head that has the embedding's weight."""
    return [
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH),
        *[LayerSpec(Block) for _ in range(blocks)],
        lambda x: x * 0.5,
        nn.LayerNorm(WIDTH),
        TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=scores),
    ]


def make(rank: int = 0, stages: int = 1, *, layers: Any = None, copies: int = 1, **words: Any) -> PipelineModule:
    job = JobRank(rank, stages * copies)
    return PipelineModule(specs() if layers is None else layers, num_stages=stages, job=job, **words)


def values(modules: list[PipelineModule]) -> dict[str, Tensor]:
    return {name: param.detach() for module in modules for name, param in module.named_parameters()}


def run_all(modules: list[PipelineModule], tokens: Tensor) -> Tensor:
    """Runs all chunks of all ranks in order, in this process."""
    value: Any = tokens
    for chunk, rank in enumerate(modules[0].rank_of):
        value = modules[rank].stages().run(chunk, (tokens,), {}, value)
    return value


LAYOUTS = [(1, 1, "loop"), (2, 1, "loop"), (4, 1, "loop"), (2, 2, "loop"), (2, 2, "v"), (1, 3, "loop")]


@pytest.mark.parametrize(("stages", "chunks", "placement"), LAYOUTS)
def test_first_values_and_results_do_not_depend_on_stages_and_chunks(stages: int, chunks: int, placement: str) -> None:
    words: dict[str, Any] = {"virtual_stages": chunks, "placement": placement, "partition_method": "uniform"}
    cut = [make(rank, stages, **words) for rank in range(stages)]
    whole = make(partition_method="uniform")
    found, expected = values(cut), values([whole])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tokens = torch.arange(WORDS)
    for module in [whole, *cut]:
        module.eval()
    assert torch.equal(run_all(cut, tokens), whole(tokens))


def test_names_are_the_numbers_of_layers_and_the_key_of_tied_ones() -> None:
    names = set(values([make()]))
    assert {name.rpartition(".")[0] for name in names} == {
        "tied_modules.embed",
        *(f"{index}.{part}" for index in range(1, 5) for part in ("up", "down")),
        "6",
        "7",
    }


@pytest.mark.parametrize(
    ("chunks", "placement", "ranks"),
    [(1, "loop", (0, 1, 2)), (2, "loop", (0, 1, 2, 0, 1, 2)), (2, "v", (0, 1, 2, 2, 1, 0))],
)
def test_chunks_go_round_the_ranks_or_to_and_fro(chunks: int, placement: str, ranks: tuple[int, ...]) -> None:
    module = make(1, 3, virtual_stages=chunks, placement=placement, partition_method="uniform")
    assert module.rank_of == ranks
    assert module.own == tuple(chunk for chunk, rank in enumerate(ranks) if rank == 1)
    assert [module.stage_owner(bound) for bound in module.partitions()[:-1]] == list(ranks)


def test_only_own_layers_are_built() -> None:
    Block.built = 0
    module = make(0, 2, partition_method=[0, 2, 8])
    assert Block.built == 1
    assert [module.stage_owner(index) for index in range(8)] == [0, 0, 1, 1, 1, 1, 1, 1]
    places = {name: child for name, child in module.named_children() if isinstance(child, AbsentBlock)}
    assert list(places) == ["2", "3", "4", "6", "7"]
    assert (places["2"].kind, places["2"].numel) == (Block, sum(p.numel() for p in Block().parameters()))
    assert len(list(module.parameters())) == 1 + 4, "the embedding's, and a block's"


def test_all_ranks_find_the_same_blocks_each_its_own() -> None:
    def blocks(module: nn.Module) -> list[str]:
        return [name for stack in find_stacks(module, skip=lambda _: False) for name, _ in stack.blocks]

    cut = [make(rank, 2, partition_method="uniform") for rank in range(2)]
    assert blocks(make()) == ["1", "2", "3", "4"]
    assert [blocks(module) for module in cut] == [["1", "2", "3"], ["4"]]
    plain = [make(rank, 2, layers=[LayerSpec(Block) for _ in range(3)]) for rank in range(2)]
    assert [name for module in plain for name in blocks(module)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("method", "bounds"),
    [("uniform", [0, 4, 8]), ("type:block", [0, 3, 8]), ([0, 1, 8], [0, 1, 8]), ("type:^Embedding$", None)],
)
def test_layers_are_cut_by_the_method(method: Any, bounds: list[int] | None) -> None:
    module = make(0, 2, partition_method=method)
    if bounds is None:
        assert {module.stage_owner(0), module.stage_owner(7)} == {0, 1}
    else:
        assert module.partitions() == bounds
        assert module.stages().own == (0,)


@pytest.mark.parametrize("method", [[0, 4, 9], "type:mamba"])
def test_a_method_that_does_not_fit_the_layers_is_refused_by_its_argument(method: Any) -> None:
    with pytest.raises(DsrunError, match=r"^PipelineModule: partition_method: "):
        make(0, 2, partition_method=method)


def test_parameters_are_balanced_by_numbers_of_trained_ones() -> None:
    frozen = nn.Linear(64, 64)
    frozen.requires_grad_(False)
    layers = [frozen, nn.Linear(8, 8), nn.Linear(8, 8), LayerSpec(nn.Linear, 16, 16)]
    module = make(0, 2, layers=layers)
    assert module.partitions() == [0, 3, 4]
    assert module.partition().costs == (0.0, 72.0, 72.0, 272.0)


@pytest.mark.parametrize("seed_layers", [True, False])
def test_building_leaves_the_random_numbers_of_the_script_alone(seed_layers: bool) -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    make(1, 2, seed_layers=seed_layers)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_first_values_are_those_of_the_seed_plus_the_layers_number() -> None:
    torch.manual_seed(99 + 1)
    expected = Block().up.weight
    assert torch.equal(values([make(base_seed=99)])["1.up.weight"], expected)
    seeds: list[int] = []
    make(1, 2, seed_layers=True, seed_fn=seeds.append, base_seed=50, partition_method="uniform")
    assert seeds == [54, 50], "layer 4, and layer 7 as the first one of its key"


def test_every_use_of_a_key_has_a_parameter_of_its_own_with_equal_values() -> None:
    for stages, chunks in ((1, (0,)), (2, (0, 1))):
        modules = [make(rank, stages, partition_method="uniform") for rank in range(stages)]
        tied = [entry for module in modules for entry in module.stages().tied]
        assert [(entry.name, entry.chunks) for entry in tied] == [("tied_modules.embed.weight", chunks)] * 2
        assert tuple(sorted({entry.chunk for entry in tied})) == chunks
        assert tied[0].param is not tied[1].param
        assert torch.equal(tied[0].param, tied[1].param)
        assert [entry.param.ds_pipe_replicated for entry in tied] == [False, True]  # pyright: ignore
    assert not make(layers=[TiedLayerSpec("one", nn.Linear, 2, 2)]).stages().tied


def test_gradients_of_the_uses_add_up_to_those_of_one_shared_weight() -> None:
    module = make(layers=[specs()[0], specs()[-1]])
    module(torch.arange(WORDS)).square().sum().backward()
    tied = module.stages().tied
    weight = tied[0].param.detach().clone().requires_grad_()
    (nn.functional.embedding(torch.arange(WORDS), weight) @ weight.t()).square().sum().backward()
    summed = sum(entry.param.grad for entry in tied if entry.param.grad is not None)
    torch.testing.assert_close(summed, weight.grad)


def test_a_forward_function_is_called_with_the_hooks_of_its_layer() -> None:
    seen: list[str] = []
    module = make()
    module.get_submodule("7").register_forward_pre_hook(lambda *_: seen.append("before"))
    module.get_submodule("7").register_forward_hook(lambda *_: seen.append("after"))
    module(torch.arange(WORDS))
    assert seen == ["before", "after"]

    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        return layer.forward(layer.forward(x))

    linear = make(layers=[TiedLayerSpec("key", nn.Linear, 2, 2, forward_fn=twice)])
    plain = nn.Linear(2, 2)
    plain.load_state_dict(linear.tied_modules["key"].state_dict())
    assert torch.equal(linear(torch.ones(2)), plain(plain(torch.ones(2))))


def test_tied_weights_come_with_the_group_of_their_stages() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        module = PipelineModule(specs(), topology=PipeDataParallelTopology(2, 2), partition_method="uniform")
        ((weight, group),) = module.get_tied_weights_and_groups()
        assert weight is module.tied_modules["embed"].get_parameter("weight")
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert (module.num_stages, module.stage_id, module.mpu().get_data_parallel_world_size()) == (2, 0, 2)
    finally:
        dist.destroy_process_group()


def test_one_tensor_or_a_tuple_goes_from_layer_to_layer() -> None:
    class Pair(nn.Module):
        def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, mask = both
            return x + mask, mask

    module = make(layers=[Pair(), Pair(), lambda both: both[0]])
    inputs = torch.ones(2), torch.full((2,), 2.0)
    assert torch.equal(module(inputs), torch.full((2,), 5.0))
    stages = module.stages()
    assert torch.equal(stages.run(0, (inputs,), {}, None), stages.run(0, inputs, {}, None))
    with pytest.raises(ModelError, match="the first layer is given mask by name"):
        stages.run(0, inputs, {"mask": inputs[1]}, None)


def test_a_sequential_is_a_list_of_layers() -> None:
    sequential = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    module = make(layers=sequential)
    assert torch.equal(module(torch.ones(2)), sequential(torch.ones(2)))
    assert list(module.state_dict()) == list(sequential.state_dict())
    first, second = (make(rank, 2, layers=sequential, partition_method=[0, 1, 3]) for rank in range(2))
    assert (list(first.state_dict()), list(second.state_dict())) == (["0.weight", "0.bias"], ["2.weight", "2.bias"])


def test_one_stage_of_many_does_not_run_alone() -> None:
    with pytest.raises(ModelError, match=r"stage 1 of 2 has \d of 8 layers, and cannot run the model alone"):
        make(1, 2)(torch.arange(WORDS))


@pytest.mark.parametrize("interval", [1, 2, 3, 20])
@pytest.mark.parametrize("seed_layers", [False, True])
def test_layers_that_run_again_change_no_bits(interval: int, seed_layers: bool) -> None:
    def grads(**words: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        module = make(seed_layers=seed_layers, **words)
        module(torch.arange(WORDS)).square().sum().backward()
        return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}

    runs = 0

    def counted(run: Callable[..., Any], *inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        return torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)

    expected = grads()
    assert expected
    again = grads(activation_checkpoint_interval=interval, activation_checkpoint_func=counted)
    assert runs > 0
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("interval", "layers", "runs"), [(1, None, 6), (1, ["Block"], 4), (2, ["Block"], 1), (8, None, 1), (0, None, 0)]
)
def test_which_layers_run_again_is_deepspeeds_rule(interval: int, layers: list[str] | None, runs: int) -> None:
    count = 0

    def counted(run: Callable[..., Any], *inputs: Any) -> Any:
        nonlocal count
        count += 1
        return run(*inputs)

    module = make(activation_checkpoint_func=counted, checkpointable_layers=layers)
    module.set_checkpoint_interval(interval)
    module(torch.arange(WORDS))
    assert count == runs
    with torch.no_grad():
        module(torch.arange(WORDS))
    assert count == runs, "nothing is kept for a backward"


def test_seeded_layers_draw_the_same_wherever_the_model_is_cut() -> None:
    def outputs(stages: int) -> Iterator[Tensor]:
        modules = [make(rank, stages, seed_layers=True, partition_method="uniform") for rank in range(stages)]
        for _ in range(2):
            yield run_all(modules, torch.arange(WORDS))

    whole, cut = list(outputs(1)), list(outputs(2))
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
    assert not torch.equal(whole[0], whole[1]), "masks differ from micro batch to micro batch"


def test_modules_of_a_chunk_hold_each_parameter_once() -> None:
    module = make(0, 2, virtual_stages=2, partition_method="uniform")
    stages = module.stages()
    found = [param for chunk in stages.own for part in stages.modules_of(chunk) for param in part.parameters()]
    assert {id(param) for param in found} == {id(param) for param in stages.module.parameters()}
    assert len(found) == len(list(module.parameters()))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_stages": None}, "neither num_stages nor topology is given"),
    ({"num_stages": 3}, "num_stages is 3; expected a divisor of the job's 2 ranks"),
    ({"num_stages": None, "topology": PipeDataParallelTopology(2, 2)}, "has 4 ranks; the job has 2"),
    ({"num_stages": None, "topology": PipeModelDataParallelTopology(1, 2, 1)}, "layers are not cut over ranks here"),
    ({"topology": PipeDataParallelTopology(1, 2)}, "num_stages is 2, and the topology has 1 stages"),
    ({"num_stages": None, "topology": ProcessTopology(["data"], [2])}, "expected `pipe` before `data`"),
    ({"partition_method": "profile"}, "partition_method is 'profile'"),
    ({"partition_method": "best"}, "expected `parameters`, `uniform`, `type:REGEX` or a list"),
    ({"virtual_stages": 0}, "virtual_stages is 0"),
    ({"placement": "w"}, "placement is 'w'; expected `loop` or `v`"),
    ({"virtual_stages": 5}, "there are 8 layers for 10 chunks"),
    ({"activation_checkpoint_interval": -1}, "activation_checkpoint_interval is -1"),
    ({"loss_fn": nn.Linear(2, 1)}, "loss_fn is a Linear with parameters"),
    ({"checkpointable_layers": "Block"}, "checkpointable_layers is 'Block'; expected a list"),
    ({"layers": [nn.ReLU(), 3]}, "layer 1 is a int; expected a module, a LayerSpec or a function"),
    (
        {"layers": [TiedLayerSpec("key", nn.Linear, 2, 2), TiedLayerSpec("key", nn.Embedding, 2, 2)]},
        "layer 1 of key 'key' is a Embedding, and the first of that key a Linear",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(DsrunError, match=message):
        PipelineModule(**{"layers": specs(), "num_stages": 2, "job": JobRank(0, 2), **words})


def test_a_weight_that_plain_modules_share_is_not_cut_in_two() -> None:
    shared = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="layers 0 and 2 are in chunks 0 and 1 and share the parameter 'weight'"):
        make(0, 2, layers=[shared, nn.ReLU(), shared], partition_method="uniform")
    assert len(list(make(layers=[shared, nn.ReLU(), shared]).parameters())) == 2


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = float(torch.ones(1).sum())

    with pytest.raises(ModelError, match=r"layer 1, Reads\(\), cannot be built on the meta device"):
        make(0, 2, layers=[nn.ReLU(), LayerSpec(Reads)])
    assert make(layers=[LayerSpec(Reads)]).stages().own == (0,), "one rank has it, and builds it"


@pytest.mark.parametrize("name", ["ckpt_prefix", "ckpt_layer_path", "save_state_dict", "load_state_dir"])
def test_names_of_deepspeeds_files_are_absent_with_the_reason(name: str) -> None:
    module = make()
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': engine.save_checkpoint"):
        getattr(module, name)
