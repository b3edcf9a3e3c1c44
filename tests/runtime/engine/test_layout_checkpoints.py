"""Twelve layouts of pipe, data and tensor ranks with ZeRO 0 to 3: saved on each, and loaded on each.

One engine a layout loads the checkpoints of all of them, one after the other, so that each goes on from what another
layout has saved and trained on. What is loaded is what was saved, bit for bit: masters, moments, step counts, buffers.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from itertools import product
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tied", "after", "layouts"), [(False, 3, LAYOUTS), (True, 1, LAYOUTS[1::3])], ids=["apart", "tied"]
)
def test_what_any_of_twelve_layouts_saves_each_of_them_loads(
    tmp_path: Path, tied: bool, after: int, layouts: list[Layout]
) -> None:
    saved = save_all(tmp_path / "saved", layouts, tied=tied, after=after)
    tensors = roles_of(saved[0].path)
    assert {"param", "exp_avg", "exp_avg_sq", "buffer"} <= tensors.keys()
    count, exact = 0, 0
    wrong: list[str] = []
    for layout in layouts:
        folder = tmp_path / "again"
        gone_on = load_all(saved, layout, folder, tied=tied, after=after)
        for number, (saver, one, found) in enumerate(zip(layouts, saved, gone_on, strict=True)):
            count += 1
            where = f"{saver} on {layout}"
            assert roles_of(folder / str(number)) == tensors, where
            wrong += [f"{where}: {name}" for name in differences(folder / str(number), one.path)]
            if order_of_sums(saver, tied=tied) == order_of_sums(layout, tied=tied):
                exact += 1
                if found != one.after:
                    wrong.append(f"{where}: {found} instead of {one.after}")
            elif found.losses != pytest.approx(one.after.losses, rel=BOUND):
                wrong.append(f"{where}: {found.losses} instead of {one.after.losses}")
        shutil.rmtree(folder)
    assert wrong == []
    assert count == (16 if tied else 144)
    groups = [order_of_sums(layout, tied=tied) for layout in layouts]
    assert exact == sum(one == other for one, other in product(groups, groups))


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


@pytest.mark.parametrize("where_to", ["copy", "reference"])
def test_a_frozen_weight_that_stages_share_is_stored_once_and_loads_everywhere(tmp_path: Path, where_to: str) -> None:
    layouts = [one.having(checkpoint={"frozen_parameters": where_to}) for one in OF_USES]
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
    for layout in layouts:

        def load(engine: Any, layout: Layout = layout) -> None:
            for number, saver in enumerate(layouts):
                engine.load_checkpoint(tmp_path, tag=str(number))
                found = train(engine, layout, range(1, 2))
                where = f"{saver} on {layout}"
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
