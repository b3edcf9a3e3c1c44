"""Norms, clipping and the search for overflow give torch's numbers, for plain parameters and for an engine's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.deepspeed.gradients import (
    CheckOverflow,
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    get_flattened_grad_norm,
    get_global_norm,
    get_global_norm_of_tensors,
    get_grad_zeros,
    get_weight_norm,
    has_inf_or_nan,
    is_invalid_grad_norm,
    is_model_parallel_parameter,
)
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, make_engine

SAMPLES = 4
LIMIT = 0.05


def plain_params() -> list[nn.Parameter]:
    """Three parameters with gradients of norm 13, and one without."""
    params = [nn.Parameter(torch.tensor(values)) for values in ([1.0, 2.0], [2.0], [0.0, 4.0, 0.0], [7.0])]
    for param, grad in zip(params, ([3.0, 0.0], [4.0], [0.0, 12.0, 0.0]), strict=False):
        param.grad = torch.tensor(grad)
    return params


def _clip_and_look() -> dict[Any, Any]:
    """What each stage says of its engine's gradients before and after clipping, and an oracle of plain torch."""
    seen: dict[Any, Any] = {}
    dsrun.init_distributed("gloo")
    inputs, targets = batches(0, samples=SAMPLES)
    torch.manual_seed(7)
    model = TinyGPT()
    loss_of(model(inputs), targets).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    seen["oracle"] = {
        "norm": float(flat.norm()),
        "norm of 3": float(flat.norm(3)),
        "largest": float(flat.abs().max()),
        "weights": float(torch.cat([param.detach().flatten() for param in model.parameters()]).norm()),
        "zeros": int((flat == 0).sum()),
    }
    for stage in (0, 1, 2, 3):
        engine = make_engine(config(stage, micro=SAMPLES // 2, gradient_clipping=0.0))
        params = list(engine.module.parameters())
        first = engine.global_rank * SAMPLES // 2
        engine.backward(loss_of(engine(inputs[first : first + SAMPLES // 2]), targets[first : first + SAMPLES // 2]))
        check = CheckOverflow([params], deepspeed=engine)
        found = {
            "held": [param.grad for param in params if param.grad is not None],
            "zeros": get_grad_zeros(params),
            "weights": get_weight_norm(params),
            "norm of 3": get_flattened_grad_norm(params, norm_type=3),
            "largest": get_flattened_grad_norm(params, norm_type=math.inf),
            "norm": float(clip_grad_norm_(params, LIMIT)),
            "clipped": get_flattened_grad_norm(params),
            "again": float(clip_grad_norm_(params, 1.0)),
            "overflow": check.check(),
        }
        grad = dsrun.zero.safe_get_full_grad(params[0])
        assert grad is not None
        grad.view(-1)[0] = math.inf
        dsrun.zero.safe_set_full_grad(params[0], grad)
        found["overflow then"] = [check.check(), check.has_overflow(iter(params)), get_flattened_grad_norm(params)]
        seen[stage] = found
        engine.destroy()
    mine = nn.Parameter(torch.zeros(1))
    mine.grad = torch.full((1,), 3.0 if torch.distributed.get_rank() else 1.0)
    seen["mean"] = [float(clip_grad_norm_(mine, 1.0)), float(mine.grad)]
    late = torch.distributed.get_rank() == 1
    seen["asked"] = [CheckOverflow().check_using_norm([-1.0 if late else 2.0])]
    seen["asked"] += [CheckOverflow().check_using_norm([-1.0 if late else 2.0], reduce_overflow=False)]
    mine.grad = torch.full((1,), math.nan if late else 1.0)
    seen["asked"] += [CheckOverflow([[mine]], zero_reduce_scatter=everywhere).check() for everywhere in (False, True)]
    seen["model parallel"] = [_of_one_model(_Unit()), _of_one_model(_UnitByAxes())]
    return seen


class _Unit:
    """Ranks that have one model between them."""

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()


class _UnitByAxes(_Unit):
    """The same, by the name that Megatron has now; the older one must not be asked."""

    def get_tensor_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_model_parallel_rank(self) -> int:
        raise AssertionError("the name for the axis goes first")


def _of_one_model(mpu: Any) -> list[float]:
    """What is said of a parameter that both ranks have, [3, 0], and one that has a part on each: [4], [12]."""
    shared, part = nn.Parameter(torch.tensor([3.0, 0.0])), nn.Parameter(torch.tensor([4.0]))
    part.model_parallel = True
    with torch.no_grad():
        part.fill_(12.0 if torch.distributed.get_rank() else 4.0)
    for param in (shared, part):
        param.grad = param.detach().clone()
    said = [get_weight_norm([shared, part], mpu=mpu), get_grad_zeros([shared, part], mpu=mpu)]
    return [*said, float(clip_grad_norm_([shared, part], 100.0, mpu=mpu))]


@pytest.fixture(scope="module")
def clipped() -> list[dict[Any, Any]]:
    return run_ranks(2, _clip_and_look)


def test_an_engines_gradients_are_read_and_clipped_at_every_stage(clipped: list[dict[Any, Any]]) -> None:
    for rank, seen in enumerate(clipped):
        oracle = seen["oracle"]
        for stage in (0, 1, 2, 3):
            found = seen[stage]
            assert found["held"] == []
            for name in ("norm", "norm of 3", "largest", "weights"):
                assert found[name] == pytest.approx(oracle[name], rel=1e-5), (stage, name)
            # A sum of two ranks' terms may be rounded to 0 where a sum in one go is not.
            assert found["zeros"] == pytest.approx(oracle["zeros"], abs=5)
            assert found["clipped"] == found["again"] == pytest.approx(LIMIT, rel=1e-4)
            assert not found["overflow"]
            assert found["overflow then"] == [True, True, -1]
        assert seen["mean"] == pytest.approx([2.0, (3.0 if rank else 1.0) / 2])
        assert seen["asked"] == [True, rank == 1, rank == 1, True]


def test_what_ranks_of_a_model_have_in_common_counts_once(clipped: list[dict[Any, Any]]) -> None:
    for seen in clipped:
        for said in seen["model parallel"]:
            assert said == pytest.approx([13.0, 1.0, 13.0])  # of 3, 4 and 12, and of one 0


def test_clipping_gradients_that_carry_a_loss_scale_is_refused() -> None:
    settings = config(0, micro=SAMPLES, gradient_clipping=0.0, fp16={"enabled": True, "initial_scale_power": 4})
    engine = make_engine(settings)
    inputs, targets = batches(0, samples=SAMPLES)
    engine.backward(loss_of(engine(inputs), targets))
    norm = get_flattened_grad_norm(engine.module.parameters())
    with pytest.raises(ModelError, match="carry the loss scale") as raised:
        clip_grad_norm_(engine.module.parameters(), LIMIT)
    assert "gradient_clipping" in str(raised.value.hint)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm / 16, rel=1e-3)
    engine.destroy()


def test_plain_gradients_are_clipped_as_torch_does() -> None:
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        ours, torchs = plain_params(), plain_params()
        norm = clip_grad_norm_(ours, 2.0, norm_type)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(torchs, 2.0, norm_type)))
        for mine, theirs in zip(ours[:3], torchs[:3], strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad)
    params = plain_params()
    assert float(clip_grad_norm_(params, 100.0)) == 13.0
    assert params[2].grad is not None
    assert params[2].grad.tolist() == [0.0, 12.0, 0.0]


def test_clipping_where_there_is_no_gradient_is_refused() -> None:
    with pytest.raises(ModelError, match="none of 1 parameters has a gradient") as raised:
        clip_grad_norm_(nn.Parameter(torch.ones(2)), 1.0)
    assert "gradient_clipping" in str(raised.value.hint)


def test_norms_of_parameters() -> None:
    params = plain_params()
    assert get_flattened_grad_norm(params) == 13.0
    masks = [torch.tensor([[0, 1]]), torch.zeros(0, 2, dtype=torch.long), torch.tensor([[0, 1], [2, 3]])]
    assert get_flattened_grad_norm(params, grad_norm_mask=masks) == pytest.approx(math.hypot(4, 12))
    assert get_flattened_grad_norm([params[3]]) == 0
    assert get_grad_zeros(params) == 3
    assert get_weight_norm(params) == pytest.approx(math.sqrt(1 + 4 + 4 + 16 + 49))
    assert get_weight_norm(params, norm_type=math.inf) == 7.0
    assert get_weight_norm(nn.Parameter(torch.tensor([math.nan]))) == -1
    assert [is_model_parallel_parameter(param) for param in params] == [False] * 4
    params[0].tensor_model_parallel = True
    assert is_model_parallel_parameter(params[0])


def test_norms_of_tensors_and_of_norms() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16), torch.zeros(0), torch.tensor(12.0)]
    norm = get_global_norm_of_tensors(tensors)
    assert (norm.item(), norm.dtype, norm.shape) == (13.0, torch.float32, ())
    assert get_global_norm_of_tensors(tensors, norm_type=math.inf) == 12.0
    assert get_global_norm_of_tensors([torch.tensor([math.inf])]) == -1.0
    assert get_global_norm([3.0, torch.tensor(4.0)]) == 5.0
    assert get_global_norm([3.0, -1.0]) == math.inf
    assert clip_tensors_by_global_norm(tensors, max_norm=6.5) == 13.0
    assert float(tensors[3]) == pytest.approx(6.0)
    kept = [torch.tensor([math.nan, 1.0])]
    assert clip_tensors_by_global_norm(kept) == -1.0
    assert kept[0][1] == 1.0
    with pytest.raises(ModelError, match="there is no tensor"):
        get_global_norm_of_tensors([])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_found(bad: float) -> None:
    values: list[Tensor] = [torch.tensor([1.0, bad]), torch.tensor([[bad]], dtype=torch.half)]
    values += [torch.tensor([0.0, bad]).to_sparse()]
    assert all(bool(has_inf_or_nan(value)) for value in values)
    assert not has_inf_or_nan(torch.zeros(0))
    assert not has_inf_or_nan(torch.tensor([0.0, 1.0]).to_sparse())
    assert is_invalid_grad_norm(bad)
    assert is_invalid_grad_norm(torch.tensor([1.0, -0.5]))
    assert not is_invalid_grad_norm(torch.tensor(0.0))
    params = plain_params()
    assert not CheckOverflow().check([params])
    params[2].grad = torch.tensor([0.0, bad, 0.0])
    assert CheckOverflow().check([params])


def test_experts_are_refused_and_nothing_to_check_too() -> None:
    expert = nn.Parameter(torch.ones(1))
    expert.allreduce = False
    with pytest.raises(ModelError, match="`allreduce` False"):
        CheckOverflow([[expert]])
    with pytest.raises(ModelError, match="there are no parameters"):
        CheckOverflow().check()
    with pytest.raises(ModelError, match="moe_ep_group"):
        get_global_norm_of_tensors([torch.ones(1)], moe_ep_group=object())
