"""Pipeline stages through whole engines, in threads: the same bits as one stage, under every schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsrun
from dsrun.errors import ModelError
from support.covering import covering
from support.pipelines import (
    MICROS,
    UPDATES,
    VOCABULARY,
    WIDTH,
    Case,
    Ended,
    Model,
    TwoTied,
    assert_same,
    items,
    loss_fn,
    run,
    weights_of,
)

PIPELINES = [
    Case(2, "gpipe"),
    Case(2, "1f1b"),
    Case(4, "1f1b"),
    Case(2, "interleaved", 2),
    Case(4, "interleaved", 2),
    Case(2, "breadth_first", 2),
    Case(4, "zero_bubble"),
    Case(2, "zbv", 2),
]


DTYPES = {"fp32": "fp32", "bf16": "bf16"}
ZERO = {f"zero{stage}": stage for stage in range(4)}


@functools.cache
def data_ranks_alone(data: int, zero: int, dtype: str, *, tied: bool = False) -> list[Ended]:
    """What the ranks have at the end without stages."""
    return run(Case(data=data, zero=zero, tied=tied, dtype=dtype))


@pytest.mark.parametrize(
    ("case", "dtype", "tied"),
    covering(
        {f"{case.schedule}-{case.stages}x{case.virtual}": case for case in PIPELINES},
        DTYPES,
        {"apart": False, "tied": True},
        together=1,
    ),
)
def test_stages_have_the_bits_of_one_stage(case: Case, dtype: str, tied: bool) -> None:
    one = data_ranks_alone(1, 0, dtype, tied=tied)[0]
    found = run(Case(case.stages, case.schedule, case.virtual, tied=tied, dtype=dtype))
    assert_same(found, one)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_and_data_ranks_have_the_bits_of_data_ranks_alone(zero: int) -> None:
    expected = data_ranks_alone(2, zero, "fp32")
    found = run(Case(2, data=2, zero=zero))
    assert expected[0].losses == expected[1].losses
    assert_same(found, expected[0])


def test_one_stage_by_train_batch_has_the_bits_of_the_loop() -> None:
    def loop(engine: Any, data_rank: int) -> Ended:
        batches, losses, norms = items(data_rank), [], []
        for _ in range(UPDATES):
            total = 0.0
            for _ in range(MICROS):
                inputs, targets = next(batches)
                loss = loss_fn(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach())
            losses.append(total / MICROS)
            norms.append(engine.get_global_grad_norm())
        return Ended(losses, norms, weights_of(engine))

    by_hand, whole = run(Case(), loop)[0], data_ranks_alone(1, 0, "fp32")[0]
    assert whole.norms == by_hand.norms
    assert whole.losses == pytest.approx(by_hand.losses, rel=1e-7)
    for name, value in whole.weights.items():
        assert torch.equal(value, by_hand.weights[name]), name


def test_uses_of_a_weight_on_one_rank_and_on_others_are_summed_once() -> None:
    expected = data_ranks_alone(2, 0, "fp32", tied=True)
    found = run(Case(2, "zbv", 2, data=2, tied=True))
    assert_same(found, expected[0])


def test_a_stage_that_trains_nothing_takes_part() -> None:
    def frozen() -> Model:
        model = Model(tied=False, dropout=0.0)
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(("blocks.6", "blocks.7", "norm", "head")))
        return model

    one = run(Case(), make=frozen)[0]
    found = run(Case(2), make=frozen)
    assert_same(found, one)


class Scaled(Model):
    """Has parameters of its own around the blocks, used before and behind them."""

    def __init__(self) -> None:
        super().__init__(tied=False, dropout=0.0)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.late = nn.Parameter(torch.full((VOCABULARY,), 0.1))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        mask_T1 = (tokens_BT != 0).to(self.scale.dtype).unsqueeze(-1)
        x_BTD = self.embedding(tokens_BT) * self.scale
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_T1)
        return self.head(self.norm(x_BTD * self.scale)) + self.late + self.positions.weight.sum()


@pytest.mark.parametrize(
    "case", [Case(2), Case(4, data=2, zero=1), Case(2, "zbv", 2), Case(2, "breadth_first", 2, zero=3)], ids=str
)
def test_parameters_of_modules_around_the_blocks_are_trained_where_they_are_used(case: Case) -> None:
    one = run(Case(data=case.data), make=Scaled)[0]
    assert_same(run(case, make=Scaled), one)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_weight_is_read_at_both_ends(dtype: str) -> None:
    def frozen() -> Model:
        model = Model(tied=True, dropout=0.0)
        model.embedding.weight.requires_grad_(False)
        return model

    plain = run(Case(dtype=dtype, plain=True), make=frozen)[0]
    for case in (Case(dtype=dtype), Case(2, dtype=dtype), Case(2, "zbv", 2, dtype=dtype)):
        assert_same(run(case, make=frozen), plain)


def test_stages_that_draw_different_items_are_refused() -> None:
    def body(engine: Any, data_rank: int) -> None:
        del data_rank
        with pytest.raises(ModelError, match="drawn different items"):
            engine.train_batch(items(engine.stage_id), loss_fn=loss_fn)

    run(Case(2), body)


class Statistics(nn.Module):
    """Layers with running statistics before, in and behind blocks, which change their input in place."""

    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.before = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)
        )
        self.behind = nn.BatchNorm1d(8, affine=affine)
        self.last = nn.Linear(8, 3)

    def forward(self, x_BH: Tensor) -> Tensor:
        x_BH = self.before(self.first(x_BH))
        for block in self.blocks:
            x_BH = block(x_BH)
        return self.last(self.behind(x_BH))


def rows() -> Iterator[tuple[Tensor, Tensor]]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(5, 8, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def test_running_statistics_are_those_of_one_stage_and_are_saved_once(tmp_path: Any) -> None:
    def save(engine: Any, data_rank: int) -> float:
        del data_rank
        batches = rows()
        for _ in range(UPDATES):
            engine.train_batch(batches, loss_fn=F.cross_entropy)
        engine.save_checkpoint(tmp_path / str(engine.num_stages))
        return float(engine.eval_batch(batches, loss_fn=F.cross_entropy))

    def load(engine: Any, data_rank: int, *, saved_at: int) -> float:
        del data_rank
        engine.load_checkpoint(tmp_path / str(saved_at))
        batches = itertools.islice(rows(), UPDATES * MICROS, None)
        return float(engine.eval_batch(batches, loss_fn=F.cross_entropy))

    (expected,) = run(Case(), save, Statistics)
    assert run(Case(2), save, Statistics) == [expected] * 2
    for saved_at, stages in itertools.product((1, 2), (1, 2)):
        found = run(Case(stages), lambda engine, rank, at=saved_at: load(engine, rank, saved_at=at), Statistics)
        assert found == [expected] * stages


def test_statistics_of_no_stage_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="`behind` keeps running statistics"):
        run(Case(2), make=lambda: Statistics(affine=False))


def test_stages_that_ask_for_other_numbers_of_micro_batches_are_refused() -> None:
    def body(engine: Any, data_rank: int) -> None:
        with pytest.raises(ModelError, match="1 to 2 micro batches"):
            engine.eval_batch(items(data_rank), loss_fn=loss_fn, num_micro_batches=1 + engine.stage_id)

    run(Case(2), body)


def test_an_evaluation_leaves_modules_in_the_mode_that_they_were_in() -> None:
    def body(engine: Any, data_rank: int) -> None:
        engine.module.blocks[0].eval()
        before = [module.training for module in engine.module.modules()]
        engine.eval_batch(items(data_rank), loss_fn=loss_fn)
        assert [module.training for module in engine.module.modules()] == before

    run(Case(), body)


@pytest.mark.parametrize(
    ("more", "dtype", "zero"),
    covering(
        {"pre": {"gradient_predivide_factor": 2.0}, "all": {"prescale_gradients": True}},
        DTYPES,
        {name: ZERO[name] for name in ("zero0", "zero1", "zero2")},
        together=1,
    ),
)
def test_divisors_before_the_sum_change_no_bits(more: dict[str, Any], dtype: str, zero: int) -> None:
    plain = data_ranks_alone(2, zero, dtype)[0]
    divided = run(Case(data=2, zero=zero, dtype=dtype, more=more))
    assert_same(divided, plain)


@pytest.mark.parametrize(
    ("dtype", "zero"), covering(DTYPES, {name: ZERO[name] for name in ("zero0", "zero1", "zero2")}, together=1)
)
def test_backwards_of_the_script_are_summed_as_the_engines(dtype: str, zero: int) -> None:
    """Micro batches are divided by a power of two, so the order of division and sum does not show."""

    def loop(engine: Any, data_rank: int, *, own: bool) -> Ended:
        batches, norms = items(data_rank), []
        for _ in range(UPDATES):
            for _ in range(MICROS):
                inputs, targets = next(batches)
                loss = loss_fn(engine(inputs), targets)
                loss.backward() if own else engine.backward(loss)
                engine.step()
            norms.append(engine.get_global_grad_norm())
        return Ended([], norms, weights_of(engine))

    case = Case(data=2, zero=zero, dtype=dtype)
    engines = run(case, lambda engine, rank: loop(engine, rank, own=False))
    assert_same(run(case, lambda engine, rank: loop(engine, rank, own=True)), engines[0])


@pytest.mark.parametrize(("data", "dtype"), covering({"data1": 1, "data2": 2}, DTYPES, together=1))
def test_a_global_batch_that_failed_leaves_nothing_behind(data: int, dtype: str) -> None:
    class Failed(Exception):
        pass

    def plain(engine: Any, data_rank: int) -> Ended:
        loss = engine.train_batch(items(data_rank), loss_fn=loss_fn)
        return Ended([float(loss)], [engine.get_global_grad_norm()], {})

    case = Case(data=data, dtype=dtype)
    expected = run(case, plain)[0]
    for found in run(case, lambda engine, rank: after_failures(engine, rank, Failed)):
        assert found.losses == expected.losses
        assert found.norms == expected.norms


def after_failures(engine: Any, data_rank: int, failed: type[Exception]) -> Ended:
    batches = list(itertools.islice(items(data_rank), MICROS))
    for failing in (0, 2):
        left = iter(range(failing))

        def fail(logits: Tensor, targets: Tensor, left: Iterator[int] = left) -> Tensor:
            if next(left, None) is None:
                raise failed
            return 3 * loss_fn(logits, targets)

        with pytest.raises(failed):
            engine.train_batch(iter(batches), loss_fn=fail)
    loss = engine.train_batch(iter(batches), loss_fn=loss_fn)
    return Ended([float(loss)], [engine.get_global_grad_norm()], {})


def loop(engine: Any, data_rank: int) -> Ended:
    """What `train` does, by the calls of scripts without a pipeline; every other backward is the script's own."""
    batches, losses, norms = items(data_rank), [], []
    for _ in range(UPDATES):
        total = torch.zeros(())
        for micro in range(MICROS):
            inputs, targets = next(batches)
            loss = loss_fn(engine(inputs), targets)
            if micro % 2:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            total += loss.detach() / MICROS
        losses.append(float(total))
        norms.append(engine.get_global_grad_norm())
    return Ended(losses, norms, weights_of(engine))


@pytest.mark.parametrize(("make", "zero"), covering({"Model": Model, "TwoTied": TwoTied}, ZERO, together=1))
def test_a_loop_over_one_stage_trains_every_use_of_a_weight(make: type[Model], zero: int) -> None:
    def model() -> Model:
        return TwoTied() if make is TwoTied else Model(tied=True, dropout=0.0)

    by_batch = run(Case(zero=zero), make=model)[0]
    by_loop = run(Case(zero=zero), loop, make=model)[0]
    assert by_loop.norms == by_batch.norms
    assert all(torch.equal(value, by_batch.weights[name]) for name, value in by_loop.weights.items())


BY_MICRO_STEP = {"gradient_reduction": "micro_step"}


@functools.cache
def plain_of_micro_steps(zero: int) -> Ended:
    return run(Case(data=2, tied=True, plain=True, zero=zero, more=BY_MICRO_STEP), loop)[0]


@pytest.mark.parametrize(
    ("body", "zero"),
    covering(
        {"train_batch": None, "loop": loop}, {name: ZERO[name] for name in ("zero0", "zero1", "zero3")}, together=1
    ),
)
def test_where_gradients_are_reduced_each_micro_step_uses_of_a_weight_are_those_of_a_plain_model(
    body: Any, zero: int
) -> None:
    plain = plain_of_micro_steps(zero)
    for found in run(Case(data=2, tied=True, zero=zero, more=BY_MICRO_STEP), body):
        # The last bits differ: small parameters outside of the blocks lie in other units.
        assert found.norms == pytest.approx(plain.norms, rel=1e-6)
        torch.testing.assert_close(found.weights, plain.weights, rtol=1e-5, atol=1e-6)


def test_a_read_of_a_gradient_before_the_step_has_all_uses_of_a_weight() -> None:
    def body(engine: Any, data_rank: int) -> Tensor:
        inputs, targets = next(items(data_rank))
        engine.backward(loss_fn(engine(inputs), targets))
        found = dsrun.utils.safe_get_full_grad(engine.module.embedding.weight)
        assert found is not None
        return found.clone()

    plain, cut = (run(Case(tied=True, plain=plain), body)[0] for plain in (True, False))
    torch.testing.assert_close(cut, plain)
