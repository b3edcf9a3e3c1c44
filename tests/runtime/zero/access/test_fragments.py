"""Masters, gradients and optimizer states through `safe_get_*` and `safe_set_*`: the same at every stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun import zero
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import ModelError
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import accumulated_gradients, batches, config, full_parameters, make_engine, train

NAMES = ("embed.weight", "position", "blocks.1.up.weight", "head.weight")


def parameters(engine: Any) -> dict[str, nn.Parameter]:
    named = dict(engine.module.named_parameters())
    return {name: named[name] for name in NAMES}


def one_backward(engine: Any) -> None:
    inputs, targets = batches(3, samples=2)
    engine.backward(loss_of(engine(inputs), targets) * (engine.global_rank + 1))


def _get(stage: int) -> dict[str, Any]:
    engine = make_engine(config(stage, micro=2, bf16=True))
    params = parameters(engine)
    early = [zero.safe_get_full_grad(params["position"]), zero.safe_get_full_optimizer_state(params["position"], "m")]
    train(engine, range(2), samples=2 * engine.world_size)
    one_backward(engine)
    masters, grads = full_parameters(engine), accumulated_gradients(engine)
    found = {
        name: (
            zero.safe_get_full_fp32_param(param),
            zero.safe_get_full_grad(param),
            zero.safe_get_full_optimizer_state(param, "exp_avg"),
        )
        for name, param in params.items()
    }
    local = {
        name: (
            zero.safe_get_local_fp32_param(param),
            zero.safe_get_local_grad(param),
            zero.safe_get_local_optimizer_state(param, "exp_avg"),
        )
        for name, param in params.items()
    }
    engine.step()
    before = engine.counters()
    zero.safe_get_full_fp32_param(params["head.weight"])
    sent = engine.counters().since(before).collectives
    return {
        "nothing yet": [*early, zero.safe_get_full_grad(params["position"])],
        "right": all(
            torch.equal(found[n][0], masters[n]) and torch.equal(found[n][1], grads[n])
            for n in NAMES  # type: ignore
        ),
        "found": found,
        "local": local,
        "cost": (sent.calls.total(), sent.bytes["broadcast"]),
    }


def test_every_stage_and_rank_gets_the_same_whole_tensors() -> None:
    stages = {stage: run_ranks(3, _get, stage) for stage in range(4)}
    first = stages[0][0]["found"]
    for stage, ranks in stages.items():
        for rank in ranks:
            assert rank["nothing yet"] == [None, None, None]
            assert rank["right"]
            for name in NAMES:
                for mine, theirs in zip(rank["found"][name], first[name], strict=True):
                    assert mine.dtype == torch.float32
                    assert torch.equal(mine, theirs), (stage, name)
        for name in NAMES:
            for kind in range(3):
                pieces = [rank["local"][name][kind] for rank in ranks]
                flat = first[name][kind].view(-1)
                if stage == 0:
                    assert all(torch.equal(piece, flat) for piece in pieces)
                else:
                    assert torch.equal(torch.cat([p for p in pieces if p is not None]), flat)
        calls, sent = ranks[0]["cost"]
        assert (calls, sent) == ((0, 0) if stage == 0 else (3, 61 * 72 * 4)), "a broadcast a piece, each byte once"


def _after_steps(stage: int, bf16: bool, stands_for_deepspeed: bool) -> list[Any]:
    if stands_for_deepspeed:
        os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    sums = {"data_types": {"grad_accum_dtype": "bf16"}} if bf16 else {}
    engine = make_engine(config(stage, micro=2, bf16=bf16, **sums))
    params = parameters(engine)

    def gradients() -> dict[str, Tensor | None]:
        return {name: zero.safe_get_full_grad(param) for name, param in params.items()}

    found: list[Any] = []
    for _ in range(2):
        one_backward(engine)
        before = gradients()
        engine.step()
        norm = engine.get_global_grad_norm()
        found.append((norm, before, gradients()))
    one_backward(engine)
    found.append(gradients())
    engine.zero_grad()
    found.append(gradients())
    if stage:
        one_backward(engine)
        engine.step()
        engine.offload_states(include=["lp_grads"])
        engine.reload_states()
        found[-1] |= {f"put away: {name}": gradient for name, gradient in gradients().items()}
    return found


@pytest.mark.parametrize(
    ("bf16", "stages"),
    [
        (False, (0, 3)),
        (True, range(4)),
        pytest.param(False, range(4), marks=pytest.mark.soak("all stages in bf16, and two of them")),
    ],
)
def test_scripts_for_deepspeed_find_the_gradient_of_the_last_step_until_the_next_backward(
    bf16: bool, stages: Sequence[int]
) -> None:
    of_stages = [run_ranks(2, _after_steps, stage, bf16, True)[1] for stage in stages]
    for *steps, fresh, forgotten in of_stages:
        for norm, before, after in steps:
            assert norm > 0.7  # so it is clipped
            for name in NAMES:
                expected = before[name] * (0.7 / norm)
                assert torch.allclose(after[name], expected, rtol=1e-2 if bf16 else 1e-5, atol=1e-7), name
        assert not torch.equal(fresh["head.weight"], steps[-1][2]["head.weight"])
        assert all(gradient is None for gradient in forgotten.values())
    for name in NAMES:
        assert all(torch.equal(found[1][2][name], of_stages[0][1][2][name]) for found in of_stages)


def test_other_scripts_find_no_gradient_after_a_step() -> None:
    (found,) = run_ranks(1, _after_steps, 2, False, False)
    assert all(gradient is None for _, _, after in found[:2] for gradient in after.values())


def _set(stage: int) -> tuple[dict[str, Tensor], list[float]]:
    engine = make_engine(config(stage, micro=2, bf16=True))
    train(engine, range(1), samples=2 * engine.world_size)
    params = parameters(engine)
    torch.manual_seed(3)
    for param in params.values():
        zero.safe_set_full_fp32_param(param, torch.randn(param.shape) * 0.05)
        zero.safe_set_full_optimizer_state(param, torch.full(param.shape, 0.01), "exp_avg")
    piece = zero.safe_get_local_fp32_param(params["position"])
    assert piece is not None
    zero.safe_set_local_fp32_param(params["position"], piece * 2)
    state = zero.safe_get_local_optimizer_state(params["position"], "exp_avg_sq")
    if state is not None:
        zero.safe_set_local_optimizer_state(params["position"], state + 1, "exp_avg_sq")
    inputs, targets = batches(5, samples=2)
    with torch.no_grad():
        seen = float(loss_of(engine(inputs), targets))
    one_backward(engine)
    for param in (params["head.weight"], params["embed.weight"]):
        zero.safe_set_full_grad(param, torch.full(param.shape, 1e-3))
    gradient = zero.safe_get_local_grad(params["position"])
    assert gradient is not None
    zero.safe_set_local_grad(params["position"], gradient * 3)
    engine.step()
    return full_parameters(engine), [seen, *train(engine, range(2, 4), samples=2 * engine.world_size)]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak("three ranks")), 3])
def test_what_is_set_is_what_forward_and_step_use_at_every_stage(world_size: int) -> None:
    results = [rank for stage in range(4) for rank in run_ranks(world_size, _set, stage)]
    for weights, losses in results[1:]:
        assert losses[1:] == results[0][1][1:]
        assert losses[0] == results[0][1][0]
        assert all(torch.equal(weights[name], value) for name, value in results[0][0].items())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_not_there_is_none_and_cannot_be_set(stage: int) -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    stranger = nn.Parameter(torch.zeros(3))
    engine = make_engine(config(stage, micro=2), model=model)
    weight = model.head.weight
    for param in (stranger, model.blocks[0].up.weight):
        assert zero.safe_get_full_fp32_param(param) is None
        assert zero.safe_get_local_grad(param) is None
        with pytest.raises(ModelError, match="no trainable parameter of an engine"):
            zero.safe_set_full_fp32_param(param, param.detach())
    with pytest.raises(ModelError, match=r"value has shape \(3,\); `head\.weight` has \(61, 72\)"):
        zero.safe_set_full_fp32_param(weight, torch.zeros(3))
    with pytest.raises(ModelError, match=r"`head\.weight` has no gradient"):
        zero.safe_set_full_grad(weight, torch.zeros(61, 72))
    with pytest.raises(ModelError, match=r"no elementwise state `exp_avg` of `head\.weight`"):
        zero.safe_set_full_optimizer_state(weight, torch.zeros(61, 72), "exp_avg")
    with pytest.raises(ModelError, match=r"value has 3 elements; this rank's piece of `head\.weight` has 4392"):
        zero.safe_set_local_fp32_param(weight, torch.zeros(3))
    is_open = pytest.raises(ModelError, match=r"`head\.weight` is open in a GatheredParameters")
    with zero.GatheredParameters(weight, modifier_rank=0), is_open:
        zero.safe_set_full_fp32_param(weight, torch.zeros(61, 72))
    assert engine.global_steps == 0


class Uneven(nn.Module):
    """A block that all ranks share, and a bias that lies on one rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.bias = nn.Linear(1, width), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x).mean() + self.bias.sum()).square()


def _locals(stage: int, width: int, optimizer: str, offload: dict[str, Any]) -> list[Any]:
    settings = config(stage, micro=1, optimizer=optimizer, bf16=bool(offload))
    settings["zero_optimization"] |= offload
    engine = make_engine(settings, model=Uneven(width))
    bias = engine.module.bias
    found: list[Any] = []

    def look() -> None:
        keys = {"AdamW": ("exp_avg", "step"), "SGD": ("momentum_buffer",), "Muon": ("exp_avg", "momentum_buffer")}
        states = [zero.safe_get_local_optimizer_state(bias, key) for key in (*keys[optimizer], "nonsense")]
        pieces = [zero.safe_get_local_fp32_param(bias), zero.safe_get_local_grad(bias), *states]
        found.append([None if piece is None else (piece.numel(), piece.dtype) for piece in pieces])
        try:
            zero.safe_set_local_optimizer_state(bias, pieces[0], keys[optimizer][0])
            zero.safe_set_full_optimizer_state(bias, torch.ones(3), keys[optimizer][0])
            found.append("set")
        except ModelError as error:
            found.append(str(error))

    look()
    for _ in range(2):
        loss = engine(torch.ones(1, 1, dtype=torch.bfloat16 if offload else torch.float32))
        engine.backward(loss)
        engine.step()
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16 if offload else torch.float32)))
    look()
    return found


@pytest.mark.parametrize(
    ("stage", "width", "optimizer", "offload"),
    [
        (1, 2000, "AdamW", {}),
        (3, 2000, "AdamW", {}),
        (3, 2000, "AdamW", {"offload_optimizer": {"device": "cpu"}}),
        (3, 2000, "AdamW", {"offload_optimizer": {"device": "cpu", "state_format": "bf16"}}),
        (2, 2000, "Muon", {}),
        (3, 2, "AdamW", {}),  # one rank has no element of any parameter
        (2, 2, "SGD", {}),
    ],
)
def test_a_rank_without_a_piece_gets_an_empty_tensor_where_others_get_theirs(
    stage: int, width: int, optimizer: str, offload: dict[str, Any]
) -> None:
    mine, others = run_ranks(2, _locals, stage, width, optimizer, offload)
    if others[0][0] != (0, torch.float32):
        mine, others = others, mine
    assert (mine[0][0], others[0][0]) == ((3, torch.float32), (0, torch.float32))
    early = [piece is not None for piece in mine[0]]
    assert early == [piece is not None for piece in others[0]]
    # Muon makes its states with itself.
    assert early == [True, False, optimizer == "Muon"] + [False] * (len(early) - 3)
    assert mine[1] == others[1]
    assert mine[1] == "set" if optimizer == "Muon" else "no elementwise state" in mine[1]
    assert [piece and piece[1] for piece in mine[2]] == [piece and piece[1] for piece in others[2]]
    assert mine[2][-1] is None
    assert [piece[0] for piece in mine[2] if piece] == [3] * sum(piece is not None for piece in others[2])
    assert not any(piece[0] for piece in others[2] if piece)
    assert sum(piece is not None for piece in mine[2]) == 3, "master, gradient and one state"
    assert mine[3] == others[3] == "set"


def test_gradients_are_changed_one_by_one_with_what_a_function_makes_of_them() -> None:
    engine = make_engine(config(2, micro=2))
    one_backward(engine)
    before = accumulated_gradients(engine)
    names = {id(param): name for name, param in engine.module.named_parameters()}
    zero.safe_update_full_grad_vectorized(
        engine.module.parameters(), lambda grad, param: grad * (2 if names[id(param)] == "head.weight" else 1)
    )
    after = accumulated_gradients(engine)
    assert all(torch.equal(after[n], v * 2 if n == "head.weight" else v) for n, v in before.items())
