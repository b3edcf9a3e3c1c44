"""Twelve layouts of pipe, data and tensor ranks with ZeRO 0 to 3: saved on each, and loaded on each.

One engine a layout loads the checkpoints of others, one after the other, so that each goes on from what another layout
has saved and trained on. What is loaded is what was saved, bit for bit: masters, moments, step counts, buffers. By
default each layout loads two and each checkpoint is loaded by two; `--soak` has all pairs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.verbs.compare import tensor_differences
from dsrun.runtime.engine.saving.resume_state import RNG_ROLE
from support.layouts import LAYOUTS, MICROS, Layout, Trained, counting_llama, on_layout, train
from support.llama import TinyLlama

BEFORE = 2
#: Products of a forward that are added up, at the most: the widest input of a layer, or the tokens of a loss.
LONGEST = 64
#: How far losses may lie apart, relative to them, where layers are cut over another number of ranks, or data ranks add
#: up gradients in another order. One sum of n products of fp32 numbers has an error of n 2^-24 of the sum of their
#: sizes at the most, in either order, so two orders differ by twice that. The norm before each layer keeps the sizes at
#: about 1, and the loss is a mean of logarithms. An update makes of a difference in a gradient one that is smaller by
#: the learning rate over AdamW's eps, which is 1 here.
BOUND = 2 * LONGEST * 2.0**-24


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what its layout has computed after it."""

    path: Path
    after: Trained


def order_of_sums(layout: Layout, *, tied: bool) -> tuple[Any, ...]:
    """What decides the order in which numbers are added up; layouts that have it in common have the same bits.

    Stages, chunks, schedules and ZeRO stages are not in it. Four data ranks add up the gradients of four micro batches
    as one does, ((a + b) + c) + d, and two (a + b) + (c + d). Of a weight that is used twice, one rank adds up the
    uses apart, over its micro batches; see [Note: uses of a parameter]. ZeRO 3 does not where units of one rank's
    chunk take turns, which is in one stage.
    """
    data = layout.data if tied else layout.data % MICROS
    together = tied and layout.stage == 3 and layout.pipe == 1
    return layout.tensor, layout.slices, 1 if data == 0 else data, together


def differences(one: Path, other: Path) -> list[str]:
    """Names and roles of tensors that differ; random numbers are a rank's own."""
    found = tensor_differences((one, read_index(one)), (other, read_index(other)))
    return [f"{tensor.name} ({tensor.role})" for tensor in found if tensor.role != RNG_ROLE]


def roles_of(path: Path) -> dict[str, int]:
    """Number of tensors of each role."""
    roles = [role for _, role in read_index(path).tensors if role != RNG_ROLE]
    return {role: roles.count(role) for role in dict.fromkeys(roles)}


def save_all(folder: Path, layouts: list[Layout], *, tied: bool, after: int) -> list[Saved]:
    """Saves on each layout, and trains on."""
    saved: list[Saved] = []
    for number, layout in enumerate(layouts):
        tag = str(number)

        def body(engine: Any, layout: Layout = layout, tag: str = tag) -> Trained:
            train(engine, layout, range(BEFORE))
            engine.save_checkpoint(folder, tag=tag)
            return train(engine, layout, range(BEFORE, BEFORE + after))

        found = on_layout(layout, body, partial(counting_llama, tied=tied))
        assert all(one == found[0] for one in found), f"{layout}: all ranks have one loss and one norm"
        saved.append(Saved(folder / tag, found[0]))
    return saved


def load_all(saved: list[Saved], layout: Layout, folder: Path, *, tied: bool, after: int) -> list[Trained]:
    """Loads all checkpoints on one layout, saves each again, and trains on."""

    def body(engine: Any) -> list[Trained]:
        found: list[Trained] = []
        for number, one in enumerate(saved):
            path, _ = engine.load_checkpoint(one.path.parent, tag=one.path.name)
            assert path is not None
            assert engine.global_steps == BEFORE
            engine.save_checkpoint(folder, tag=str(number))
            found.append(train(engine, layout, range(BEFORE, BEFORE + after)))
        return found

    found = on_layout(layout, body, partial(counting_llama, tied=tied))
    assert all(one == found[0] for one in found), f"{layout}: all ranks have one loss and one norm"
    return found[0]


ALL_PAIRS = pytest.mark.soak("each layout loads two others, and is loaded by two")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tied", "after", "layouts", "steps"),
    [
        # Two places on is one with the same order of sums for four of them; of seven places on, most differ in
        # nearly everything. What moments do shows in the loss after the next update.
        pytest.param(False, 2, LAYOUTS, (2, 7), id="apart"),
        pytest.param(True, 1, LAYOUTS[1::3], (0, 1), id="tied"),
        pytest.param(False, 3, LAYOUTS, range(12), id="apart, all pairs", marks=ALL_PAIRS),
        pytest.param(True, 1, LAYOUTS[1::3], range(4), id="tied, all pairs", marks=ALL_PAIRS),
    ],
)
def test_what_any_of_twelve_layouts_saves_each_of_them_loads(
    tmp_path: Path, tied: bool, after: int, layouts: list[Layout], steps: Sequence[int]
) -> None:
    """Each loads the checkpoints of those that stand so many places behind it in the list, which begins anew."""
    all_saved = save_all(tmp_path / "saved", layouts, tied=tied, after=after)
    tensors = roles_of(all_saved[0].path)
    assert {"param", "exp_avg", "exp_avg_sq", "buffer"} <= tensors.keys()
    exact = 0
    loaded: list[int] = []
    wrong: list[str] = []
    for place, layout in enumerate(layouts):
        folder = tmp_path / "again"
        savers = [(place + step) % len(layouts) for step in steps]
        loaded += savers
        gone_on = load_all([all_saved[saver] for saver in savers], layout, folder, tied=tied, after=after)
        for number, (saver, found) in enumerate(zip(savers, gone_on, strict=True)):
            one = all_saved[saver]
            where = f"{layouts[saver]} on {layout}"
            assert roles_of(folder / str(number)) == tensors, where
            wrong += [f"{where}: {name}" for name in differences(folder / str(number), one.path)]
            if order_of_sums(layouts[saver], tied=tied) == order_of_sums(layout, tied=tied):
                exact += 1
                if found != one.after:
                    wrong.append(f"{where}: {found} instead of {one.after}")
            elif found.losses != pytest.approx(one.after.losses, rel=BOUND):
                wrong.append(f"{where}: {found.losses} instead of {one.after.losses}")
        shutil.rmtree(folder)
    assert wrong == []
    assert sorted(loaded) == sorted([*range(len(layouts))] * len(steps)), "each is loaded as often as it loads"
    groups = [order_of_sums(layout, tied=tied) for layout in layouts]
    count = len(groups)
    assert exact == sum(groups[place] == groups[(place + step) % count] for place in range(count) for step in steps) > 0


def frozen_tied_llama() -> TinyLlama:
    model = counting_llama(tied=True)
    model.embed_tokens.weight.requires_grad_(False)
    return model


TURNS = Layout(pipe=2, virtual=2, schedule="breadth_first", stage=3)
#: Layouts in which one stage, two stages or one rank of two chunks have both uses of the vocabulary.
OF_USES = [
    *(Layout(), Layout(data=2, stage=3), Layout(pipe=2), Layout(pipe=2, virtual=2, schedule="zbv")),
    *(TURNS, Layout(pipe=2, tensor=2)),
]


@pytest.mark.parametrize(
    ("where_to", "uses", "steps"),
    [
        pytest.param("copy", OF_USES, (1, 4), id="copy"),
        pytest.param("reference", OF_USES[1::2], (1, 2), id="reference"),
        pytest.param("copy", OF_USES, range(6), id="copy, all pairs", marks=ALL_PAIRS),
        pytest.param("reference", OF_USES, range(6), id="reference, all pairs", marks=ALL_PAIRS),
    ],
)
def test_a_frozen_weight_that_stages_share_is_stored_once_and_loads_everywhere(
    tmp_path: Path, where_to: str, uses: list[Layout], steps: Sequence[int]
) -> None:
    layouts = [one.having(checkpoint={"frozen_parameters": where_to}) for one in uses]
    after: list[Trained] = []
    for number, layout in enumerate(layouts):

        def save(engine: Any, layout: Layout = layout, tag: str = str(number)) -> Trained:
            train(engine, layout, range(1))
            engine.save_checkpoint(tmp_path, tag=tag)
            return train(engine, layout, range(1, 2))

        after.append(on_layout(layout, save, frozen_tied_llama)[0])
        index = read_index(tmp_path / str(number))
        assert ("embed_tokens.weight", "param") in index.tensors, layout
        assert ("lm_head.weight", "param") not in index.tensors, layout
        assert index.aliases == {"lm_head.weight": "embed_tokens.weight"}, layout
    for place, layout in enumerate(layouts):

        def load(engine: Any, layout: Layout = layout, place: int = place) -> None:
            for step in steps:
                number = (place + step) % len(layouts)
                engine.load_checkpoint(tmp_path, tag=str(number))
                found = train(engine, layout, range(1, 2))
                where = f"{layouts[number]} on {layout}"
                assert found.losses == pytest.approx(after[number].losses, rel=BOUND), where
                assert found.norms == pytest.approx(after[number].norms, rel=1e-5), where

        on_layout(layout, load, frozen_tied_llama)


@pytest.mark.parametrize("layout", OF_USES, ids=str)
def test_without_frozen_weights_none_of_the_names_of_one_is_in_a_checkpoint(tmp_path: Path, layout: Layout) -> None:
    def save(engine: Any) -> Trained:
        engine.save_checkpoint(tmp_path, tag="trained", exclude_frozen_parameters=True)
        weights = engine.module_state_dict(exclude_frozen_parameters=True, all_ranks=True)
        assert not {"embed_tokens.weight", "lm_head.weight"} & weights.keys()
        return train(engine, layout, range(1))

    def load(engine: Any) -> Trained:
        engine.load_checkpoint(tmp_path, tag="trained")
        return train(engine, layout, range(1))

    saved = on_layout(layout, save, frozen_tied_llama)
    index = read_index(tmp_path / "trained")
    assert index.aliases == {}
    assert not {name for name, _ in index.tensors} & {"embed_tokens.weight", "lm_head.weight"}
    assert ("norm.weight", "param") in index.tensors
    assert on_layout(layout, load, frozen_tied_llama) == saved
