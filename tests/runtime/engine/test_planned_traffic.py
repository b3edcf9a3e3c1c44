"""Every byte that ranks move in an update and hold after it is one that the plan counts: all ranks, axes and kinds.

The plan of 4,096 ranks (tensor 8, pipe 16, data 32; see docs/scale.md) at 1/256 of its size, in threads.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dsrun
from dsrun.estimate.memory.model_state import FP32_BYTES, pad_units, state_bytes
from dsrun.estimate.model.activations import block_bytes_per_token
from dsrun.estimate.model.architecture import Architecture, from_transformers
from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.model.units import from_architecture
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings, read_settings
from dsrun.estimate.time.axes import axis_traffic
from dsrun.estimate.time.pipeline import pipeline_estimate
from dsrun.mesh_spec import MeshSpec
from dsrun.runtime.engine.step_sums import NUMBERS
from dsrun.runtime.mesh.collectives import Traffic
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.inside_engine import mesh_of
from support.llama import MICRO, TIME, llama, on_threads, tokens, train
from support.threaded_ranks import ranks_of_threads

MICROS, SAMPLES, SEQUENCE, VOCAB = 4, 2, 8, 64
FP64_BYTES = 8
#: Numbers that `take_step` of runtime/engine/step.py sums over all ranks: the norm's sum, those of `StepSums`, the
#: unused parameters; three of ranks that share layers.
SUMS, SUMS_OF_SHARED_LAYERS = 1 + NUMBERS + 1, 3
#: Numbers in which stages compare a global batch: `BatchCalls` of runtime/engine/deepspeed/batch_calls.py.
BATCH_NUMBERS = 5

#: Bytes by the axes on which peers differ, the number of peers, and the kind.
Moved = Counter[tuple[tuple[str, ...], int, str]]


@dataclass(frozen=True)
class Plan:
    """A layout of ranks.

    Attributes:
        data: ranks with samples of their own.
        tensor: ranks that share each layer.
        pipe: pipeline stages.
        chunks: chunks of a stage.
        schedule: order of the chunks' passes.
        stage: ZeRO stage.
        slices: whether blocks work on slices of the sequence.
        tied: whether embedding and head have one weight.
        dtype: format of the parameters.
        policy: recomputation.
    """

    data: int
    tensor: int
    pipe: int
    chunks: int = 1
    schedule: str = "1f1b"
    stage: int = 1
    slices: bool = False
    tied: bool = False
    dtype: str = "bf16"
    policy: str = "none"

    def __str__(self) -> str:
        more = "-slices" * self.slices + "-tied" * self.tied + f"-{self.dtype}"
        more += f"-{self.policy}" * (self.policy != "none")
        return f"d{self.data}-t{self.tensor}-p{self.pipe}-v{self.chunks}-{self.schedule}-zero{self.stage}{more}"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipe

    @property
    def model(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=6 if self.pipe * self.chunks == 2 else 8,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            tie_word_embeddings=self.tied,
        )

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICROS,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "tensor_parallel": {"autotp_size": self.tensor, "sequence_parallel": self.slices},
            "pipeline": {"stages": self.pipe, "schedule": self.schedule, "virtual_stages": self.chunks},
            "activation_checkpointing": {"policy": self.policy},
        }


@dataclass(frozen=True)
class Seen:
    """What one rank did in an update.

    Attributes:
        moved: bytes that it moved.
        held: bytes of model state that it has after it.
        units: trained units that it has.
        spec: the grid of ranks.
        settings: its settings, as the plan reads them.
    """

    moved: Moved
    held: int
    units: int
    spec: MeshSpec
    settings: RunSettings


def batches(data_rank: int) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(data_rank)
    while True:
        words = torch.randint(0, VOCAB, (SAMPLES, SEQUENCE), generator=draw)
        yield {"input_ids": words, "labels": words}


def observed(plan: Plan) -> list[Seen]:
    """Trains an engine a rank, and returns what each did in an update that is not its first."""
    torch.manual_seed(0)
    first = LlamaForCausalLM(plan.model)
    models = [first, *(copy.deepcopy(first) for _ in range(1, plan.ranks))]

    def body(rank: LoopbackCollectives) -> Seen:
        engine: Any = dsrun.initialize(model=models[rank.rank], config=plan.config)[0]
        samples = batches(engine.grid.get_data_parallel_rank())
        engine.train_batch(samples)
        mesh = mesh_of(engine)
        # What a rank alone is asked to move stays where it is.
        counted = {mesh.spec.peers(rank.rank, axes): view.traffic for axes, view in mesh.views.items() if axes}
        counted |= {ranks: ties.traffic for ranks, ties in mesh.stages.items()}
        before = {ranks: traffic.since(Traffic()) for ranks, traffic in counted.items()}
        sent = mesh.links.traffic.bytes["send"]
        engine.train_batch(samples)
        moved: Moved = Counter()
        for ranks, traffic in counted.items():
            for kind, size in traffic.since(before[ranks]).bytes.items():
                moved[axes_of(mesh.spec, ranks), len(ranks), kind] += size
        moved[("pipe",), plan.pipe, "send"] += mesh.links.traffic.bytes["send"] - sent
        seen = Seen(
            moved=moved,
            held=engine.model_state_bytes(),
            units=len(engine._sharded.units),
            spec=mesh.spec,
            settings=read_settings(engine._settings, ranks=plan.ranks, sequence=SEQUENCE),
        )
        engine.destroy()
        return seen

    with ranks_of_threads(torch.device("cpu")) as run:
        return LoopbackWorld(plan.ranks).run(lambda rank: run(rank, body))


def axes_of(spec: MeshSpec, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the axes on which some of these ranks differ."""
    places = [spec.coordinate(rank) for rank in ranks]
    return tuple(axis.name for axis in spec.axes if len({place[axis.name] for place in places}) > 1)


def planned(plan: Plan, settings: RunSettings) -> list[tuple[Moved, int]]:
    """Returns the bytes that ranks of each stage move, and those of model state that they hold, by the plan."""
    machine = Machine(label="threads", ranks=plan.ranks, ranks_per_host=plan.ranks)
    shape = from_transformers(plan.model.to_dict(), source="the test")
    stages = cut_into_stages(from_architecture(shape, label="small"), settings)
    pipeline = pipeline_estimate(stages, settings)
    assert pipeline is not None
    shard = settings.ranks_of("shard", plan.ranks)
    found: list[tuple[Moved, int]] = []
    for stage, estimate in zip(stages, pipeline.stages, strict=True):
        units = pad_units(stage.model.units, shard, tensor_parallel=plan.tensor, by_block=True)
        moved: Moved = Counter()
        for axis in axis_traffic(stage, units, settings, machine, boundary_bytes=estimate.sent_bytes):
            for kind, size in axis.buffers.items():
                moved[axis.axes, axis.ranks, kind] += size
        found.append((moved, state_bytes(units, settings).total))
    return found


def of_single_numbers(plan: Plan, spec: MeshSpec) -> Moved:
    """Returns the bytes of the norm, the losses and the comparisons of an update, which the plan leaves out."""
    of_stages = 1 + 2 * plan.pipe  # the largest block of gradients, and two marks of each stage: `global_totals`
    sums = SUMS + (SUMS_OF_SHARED_LAYERS if plan.tensor > 1 else 0)
    world = spec.wide(spec.role_axes("world"))
    return Counter(
        {
            (world, plan.ranks, "all_reduce"): FP64_BYTES * (of_stages + sums),
            (("pipe",), plan.pipe, "all_reduce"): FP64_BYTES * BATCH_NUMBERS,
        }
    )


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 2, 4, 2, "interleaved", slices=True),
        Plan(2, 2, 2, 2, "breadth_first", stage=3, slices=True),
        Plan(2, 2, 2, dtype="fp32"),
        Plan(2, 2, 2, 2, "interleaved", stage=2, tied=True),
        Plan(2, 1, 3, tied=True),
        Plan(2, 1, 2, 4, "breadth_first", stage=3),
        Plan(2, 1, 2, 3, "breadth_first", stage=2, tied=True),
        pytest.param(
            Plan(2, 1, 2, 4, "breadth_first", stage=3, tied=True),
            marks=pytest.mark.soak("breadth_first with ZeRO 3 apart, and tied with ZeRO 2"),
        ),
        Plan(1, 2, 2, 2, "zbv", slices=True),
        Plan(1, 2, 2, 1, "zero_bubble", slices=True),
        Plan(1, 2, 2, slices=True, policy="every_block"),
        Plan(1, 2, 2, 2, "interleaved", slices=True, policy="selective"),
        Plan(1, 2, 2, policy="every_block"),
        # Two heads of keys and values, and so each rank has all of both projections and works with one head.
        Plan(1, 4, 2, 2, "interleaved"),
        Plan(1, 4, 2, slices=True),
        pytest.param(Plan(2, 4, 2, stage=2), marks=pytest.mark.soak("4 ranks share layers, and ZeRO 2 of two such")),
    ],
    ids=str,
)
def test_ranks_move_and_hold_what_the_plan_counts_to_the_byte(plan: Plan) -> None:
    found = observed(plan)
    counted = planned(plan, found[0].settings)
    for rank, seen in enumerate(found):
        moved, state = counted[seen.spec.stage_of(rank)]
        assert seen.moved == moved + of_single_numbers(plan, seen.spec), f"rank {rank}"
        # AdamW counts its steps beside the states, once for each unit that the rank has a slice of.
        assert 0 <= seen.held - state <= 4 * seen.units, f"rank {rank}"


@pytest.mark.parametrize(
    ("tensor", "key_heads", "slices"), [(1, 4, False), (2, 4, False), (2, 4, True), (4, 2, False), (4, 2, True)]
)
def test_a_block_saves_what_the_plan_counts_and_the_statistics_of_its_norms_and_attention(
    tensor: int, key_heads: int, slices: bool
) -> None:
    """LayerNorm is one kernel on a CPU, as RMSNorm is on a GPU; of others each part saves tensors of its own."""
    shape = Architecture(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=key_heads, head_dim=16, vocab=VOCAB)

    def body(engine: Any, data_rank: int) -> int:
        train(engine, data_rank, range(1))  # what the first forward compares is saved, too
        weights = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept.append(tensor)  # so that no other one has its address
            return tensor

        kept: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        block = engine.module.layers[1]
        block.register_forward_pre_hook(lambda *_: hooks.__enter__())
        block.register_forward_hook(lambda *_: hooks.__exit__())
        engine(tokens(1, 0, data_rank)[:, :-1])
        return sum(size for place, size in saved.items() if place not in weights)

    many = MICRO * TIME
    settings = RunSettings(axis_sizes={"tensor": tensor}, sequence_slices=slices, micro_batch=MICRO, sequence=TIME)
    # Mean and deviation of a token in either norm, and the logarithm of a sum for each of its heads.
    statistics = 2 * 2 * many // settings.sequence_parts + shape.heads // tensor * many
    found = on_threads(
        tensor,
        tensor,
        body,
        make=lambda: llama(heads=4, key_heads=key_heads, inner=128, bias=False),
        tensor_parallel={"sequence_parallel": slices},
    )
    assert found == [many * block_bytes_per_token(shape, settings) + FP32_BYTES * statistics] * tensor
