"""Each optimizer against its origin: torch's own class, or the paper's formulas written plainly, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.optim.algorithms.adafactor import Adafactor
from dsrun.runtime.optim.algorithms.adam_mini import AdamMini
from dsrun.runtime.optim.algorithms.eight_bit import Adam8bit, Lion8bit
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.algorithms.muon import Muon, is_matrix
from dsrun.runtime.optim.registry import factory_of
from dsrun.runtime.optim.structure.codes import BLOCK, dynamic_values
from support.shards import UNITS, Values, assert_near, random_values, train_shards, train_whole

STEPS = 4
LR, DECAY, B1, B2, EPS = 1e-2, 0.1, 0.9, 0.98, 1e-8
#: A formula: (name, weights, gradient, step from 1 on, the tensor's own state) -> new weights.
Formula = Callable[[str, Tensor, Tensor, int, dict[str, Tensor]], Tensor]


def by_formula(formula: Formula) -> Values:
    values = {name: value.double() for name, value in random_values(0).items()}
    states: dict[str, dict[str, Tensor]] = {name: {} for name in values}
    for step in range(STEPS):
        for name, grad in random_values(step + 1).items():
            if grad.numel():
                values[name] = formula(name, values[name], grad.double(), step + 1, states[name])
    return {name: value.float() for name, value in values.items()}


def mean(state: dict[str, Tensor], key: str, new: Tensor, decay: float) -> Tensor:
    """A running mean that starts at zero."""
    state[key] = decay * state.get(key, torch.zeros_like(new)) + (1 - decay) * new
    return state[key]


def lion(name: str, p: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
    c = B1 * state.get("m", torch.zeros_like(g)) + (1 - B1) * g
    mean(state, "m", g, B2)
    return p - LR * (c.sign() + DECAY * p)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_adam_without_bias_correction_follows_the_formula(decoupled: bool, world_size: int) -> None:
    def formula(name: str, p: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
        g = g if decoupled else g + DECAY * p
        m, v = mean(state, "m", g, B1), mean(state, "v", g * g, B2)
        return p - LR * (m / (v.sqrt() + EPS) + (DECAY * p if decoupled else 0))

    params = {"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
    factory = factory_of("Adam", {**params, "adam_w_mode": decoupled, "amsgrad": False})
    assert_near(train_shards(factory, world_size=world_size, steps=range(STEPS)).values, by_formula(formula))


def lamb(name: str, p: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
    m, v = mean(state, "m", g, B1) / (1 - B1**t), mean(state, "v", g * g, B2) / (1 - B2**t)
    u = m / (v.sqrt() + EPS) + DECAY * p
    norms = p.norm(), u.norm()
    scale = (norms[0] / norms[1]).clamp(0.01, 10.0) if min(norms) > 0 else 1.0
    return p - LR * scale * u


def adam_mini(name: str, p: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
    heads = 4
    blocks = g.reshape(1, -1) if g.ndim < 2 else g.reshape(heads if "q_proj" in name else g.shape[0], -1)
    v = mean(state, "v", blocks.square().mean(dim=1, keepdim=True), B2) / (1 - B2**t)
    m = mean(state, "m", g, B1) / (1 - B1**t)
    return p - LR * DECAY * p - LR * (m.reshape(blocks.shape) / (v.sqrt() + EPS)).reshape(p.shape)


def muon(name: str, p: Tensor, g: Tensor, t: int, state: dict[str, Tensor]) -> Tensor:
    if not is_matrix(name, tuple(p.shape)):
        m, v = mean(state, "m", g, B1) / (1 - B1**t), mean(state, "v", g * g, B2) / (1 - B2**t)
        return p - LR / 10 * (m / (v.sqrt() + EPS) + DECAY * p)
    momentum = mean(state, "m", g, 0.95)
    x = (0.05 * g + 0.95 * momentum).flatten(1).bfloat16()
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = (x.T if rows > columns else x).double() * math.sqrt(max(1.0, rows / columns))
    return p - LR * (x.reshape(p.shape) + DECAY * p)


ORIGINS: dict[str, tuple[Callable[[Any], optim.Optimizer], Formula, float]] = {
    "Lion": (lambda groups: Lion(groups, LR, (B1, B2), DECAY), lion, 1e-6),
    "Lamb": (lambda groups: Lamb(groups, LR, betas=(B1, B2), weight_decay=DECAY), lamb, 2e-6),
    "AdamMini": (lambda groups: AdamMini(groups, LR, (B1, B2), EPS, DECAY, num_heads=4), adam_mini, 2e-6),
    # bf16 in the products: the weights move by 1e-2, of which bf16 keeps two to three digits.
    "Muon": (
        lambda groups: Muon(groups, LR, 0.95, DECAY, adam_lr=LR / 10, betas=(B1, B2), eps=EPS),
        muon,
        1e-3,
    ),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_it_follows_the_formulas(name: str) -> None:
    make, formula, tolerance = ORIGINS[name]
    expected = by_formula(formula)
    assert_near(train_whole(make, steps=range(STEPS)), expected, tolerance=tolerance)
    assert_near(train_shards(make, world_size=3, steps=range(STEPS)).values, expected, tolerance=tolerance)


def test_adafactor_is_torchs() -> None:
    units = [[item for item in unit if item[0] != "nothing"] for unit in UNITS]  # torch divides by its size
    for options in ({}, {"weight_decay": 0.1, "d": 2.0, "eps": (1e-6, 1e-2), "beta2_decay": -0.5}):
        expected = train_whole(
            lambda groups, o=options: optim.Adafactor(groups, lr=LR, foreach=False, **o), units=units
        )
        ours = train_shards(lambda groups, o=options: Adafactor(groups, lr=LR, **o), world_size=2, units=units)
        assert_near(ours.values, expected, tolerance=2e-5)


def test_torchs_muon_and_ours_agree_on_a_matrix() -> None:
    units = [[("w", (40, 24))]]
    ours = train_shards(lambda groups: Muon(groups, LR, 0.95, DECAY), world_size=2, units=units).values
    theirs = train_whole(lambda groups: optim.Muon(groups, LR, DECAY, 0.95), units=units)
    assert_near(ours, theirs, tolerance=1e-4)


def test_the_gram_method_orthogonalises_as_the_standard_one() -> None:
    units = [[("w", (16, 96)), ("v", (96, 16))]]
    first = random_values(0, units)
    standard, gram = (
        train_shards(lambda groups, m=method: Muon(groups, 1.0, ns_method=m), world_size=2, units=units, steps=range(1))
        for method in ("standard", "gram")
    )
    for name in first:
        moved, other = first[name] - standard.values[name], first[name] - gram.values[name]
        assert float((moved - other).norm() / moved.norm()) < 0.02, name
        values = torch.linalg.svdvals(other / math.sqrt(max(1.0, other.shape[0] / other.shape[1])))
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.5, name


# 8 bits ---------------------------------------------------------------------------------------------------------------


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """What blocks of 256 become in 8 bits: each value by its block's largest, at the table's nearest."""
    blocks = values.reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    relative = blocks / scales
    chosen = (relative.unsqueeze(-1) - table).abs().argmin(dim=-1)
    if bool((table < 0).any()):
        below = int((table == 0).nonzero()) - 1
        chosen = torch.where((relative < 0) & (chosen == below + 1), below, chosen)
    return (table[chosen] * scales).reshape(values.shape)


def test_8_bit_adam_follows_bitsandbytes_kernel() -> None:
    units = [[("a", (3, 256)), ("b", (2, 128))]]
    signed, unsigned = dynamic_values(signed=True), dynamic_values(signed=False)
    expected = random_values(0, units)
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in range(1, STEPS + 1):
        for name, g in random_values(step, units).items():
            m, v = states[name]
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
            root = math.sqrt(1 - B2**step)
            p = expected[name] * (1 - LR * DECAY)
            expected[name] = p - LR * root / (1 - B1**step) * m / (v.sqrt() + root * EPS)
            states[name] = nearest(m, signed), nearest(v, unsigned)
    options: dict[str, Any] = {"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "min_8bit_size": 0}
    for world_size in (1, 2):
        ours = train_shards(
            lambda groups: Adam8bit(groups, **options), world_size=world_size, units=units, steps=range(STEPS)
        )
        assert_near(ours.values, expected, tolerance=1e-6)


def test_8_bit_lion_follows_lion_on_decoded_states() -> None:
    units = [[("a", (3, 256))]]
    table = dynamic_values(signed=True)
    p, m = random_values(0, units)["a"], torch.zeros(3, 256)
    for step in range(1, STEPS + 1):
        g = random_values(step, units)["a"]
        p = p - LR * DECAY * p - LR * (B1 * m + (1 - B1) * g).sign()
        m = nearest(B2 * m + (1 - B2) * g, table)
    ours = train_shards(
        lambda groups: Lion8bit(groups, LR, (B1, B2), DECAY, min_8bit_size=0), world_size=3, units=units, steps=range(4)
    )
    assert_near(ours.values, {"a": p}, tolerance=1e-6)


def test_small_tensors_keep_fp32_states() -> None:
    trained = train_shards(lambda groups: Adam8bit(groups), world_size=1, units=[[("w", (64, 64)), ("b", (4095,))]])
    dtypes = {(entry.name, entry.role): entry.tensor.dtype for entry in trained.entries[0]}
    assert dtypes["w", "exp_avg_codes"] == torch.uint8
    assert dtypes["b", "exp_avg"] == torch.float32
    assert ("b", "exp_avg_codes") not in dtypes


# Which tensors are what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("blocks.3.conv.weight", (8, 4, 3, 3), True),
        ("model.embed_tokens.weight", (8, 8), False),
        ("transformer.wte.weight", (8, 8), False),
        ("lm_head.weight", (8, 8), False),
        ("head.weight", (8, 8), False),
        ("multihead.weight", (8, 8), True),
        ("norm.weight", (8,), False),
        ("nothing", (0, 8), False),
    ],
)
def test_muon_takes_matrices_of_hidden_layers(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(name, shape) is expected


def test_adam_mini_cuts_heads_rows_and_whole_vectors() -> None:
    optimizer = AdamMini([nn.Parameter(torch.zeros(1))], num_heads=8, num_kv_heads=2)
    assert optimizer.block_size("layers.0.attn.q_proj.weight", (64, 32)) == 64 // 8 * 32
    assert optimizer.block_size("layers.0.attn.k_proj.weight", (16, 32)) == 16 // 2 * 32
    assert optimizer.block_size("layers.0.attn.v_proj.weight", (16, 32)) == 32
    assert optimizer.block_size("embed.weight", (100, 32)) == 32
    assert optimizer.block_size("layers.0.attn.q_proj.bias", (64,)) == 64
    with pytest.raises(ModelError, match=r"`l\.q_proj\.weight` has 12 rows, which 8 heads do not divide"):
        optimizer.block_size("l.q_proj.weight", (12, 4))


@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit"])
def test_bitsandbytes_itself_gives_the_same_where_it_is_installed(name: str) -> None:
    bits = pytest.importorskip("bitsandbytes")
    units = [[("a", (64, 256))]]
    ours = train_shards(
        lambda groups: {"Adam8bit": Adam8bit, "Lion8bit": Lion8bit}[name](groups, LR, (B1, B2), weight_decay=DECAY),
        world_size=2,
        units=units,
        steps=range(STEPS),
    ).values["a"]
    param = nn.Parameter(random_values(0, units)["a"])
    theirs = getattr(bits.optim, name)([param], lr=LR, betas=(B1, B2), weight_decay=DECAY)
    for step in range(STEPS):
        param.grad = random_values(step + 1, units)["a"]
        theirs.step()
    # Ties between codes and the order of operations differ; a code is off by at most one in a few elements.
    off = (ours - param.detach()).abs() / LR
    assert float((off > 1e-3).float().mean()) < 0.02
    assert float(off.mean()) < 5e-3


@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit"])
def test_bitsandbytes_kernels_step_our_states_where_it_is_installed(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    kind = {"Adam8bit": Adam8bit, "Lion8bit": Lion8bit}[name]
    units = [[("a", (64, 256)), ("b", (16, 65)), ("c", (32, 128))]]
    plain, fast = (
        train_shards(
            lambda groups, k=kernels: kind(groups, LR, (B1, B2), weight_decay=DECAY, min_8bit_size=0, kernels=k),
            world_size=2,
            units=units,
            steps=range(STEPS),
        )
        for kernels in ("torch", "bitsandbytes")
    )
    # A sign of Lion that turns moves a weight by twice the rate.
    for key, value in plain.values.items():
        off = (fast.values[key] - value).abs() / LR
        assert float((off > 1e-3).float().mean()) < 0.05, key
