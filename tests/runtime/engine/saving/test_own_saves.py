"""What a script finds right after `save_checkpoint`, whichever engine looks; and what may name a folder or a tag."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dsrun
from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.errors import InputError
from support.inside_engine import components_of, saver_of
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train


def held_up(engine: Any) -> threading.Event:
    """Holds the copies of the engine's next save up until the event is set."""
    held = threading.Event()

    def hold(unit: int) -> None:
        held.wait(30.0)

    saver_of(engine).fence.pace = hold
    return held


def let_go_when_waited_for(engine: Any, held: threading.Event) -> None:
    """Sets the event as soon as somebody waits for the engine's save."""
    save = saver_of(engine)._last.save
    wait = save.wait

    def told(progress: Any) -> None:
        held.set()
        wait(progress)

    save.wait = told


def _look(folder: str, stages: list[int]) -> None:
    dsrun.init_distributed()
    for stage in stages:
        place = Path(folder) / str(stage)
        behind = {"asynchronous": True, "when_copied": "behind"}
        writes = make_engine(config(stage, micro=2, checkpoint=behind))
        reads = make_engine(config(stage, micro=2))
        train(writes, range(2), samples=4)
        held = held_up(writes)
        try:
            writes.save_checkpoint(place)
            let_go_when_waited_for(writes, held)
            path, _ = reads.load_checkpoint(place)
            assert path == str(place / "global_step2")
            held.clear()
            writes.save_checkpoint(place, tag="again")
            let_go_when_waited_for(writes, held)
            assert find_tag(place) == place / "again"
        finally:
            held.set()
        expected = full_parameters(writes)
        assert all(torch.equal(values, expected[name]) for name, values in full_parameters(reads).items())
        writes.destroy()
        reads.destroy()


def test_another_engine_of_the_job_waits_for_what_is_being_written(tmp_path: Path) -> None:
    run_ranks(2, _look, str(tmp_path), [3])


class Named:
    """A path of neither str nor pathlib."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


def _paths(folder: str) -> None:
    dsrun.init_distributed()
    place = Path(folder)
    engine = make_engine(config(1, micro=2))
    engine.save_checkpoint(Named(place / "run"), tag=Named("first"))
    assert engine.load_checkpoint(Named(place / "run"))[0] == str(place / "run" / "first")
    assert engine.load_checkpoint(Named(place / "run"), tag=Named("first"))[0] == str(place / "run" / "first")
    engine.save_16bit_model(Named(place), Named("w.safetensors"))
    dsrun.zero.load_pretrained(engine.module, Named(place / "w.safetensors"))
    engine.save_on_signal(Named(place / "stopped"))
    components_of(engine).on_signal.forget()
    wrong: Any
    for wrong in (None, b"run", 3):
        for who, call in (
            ("save_checkpoint: save_dir is", partial(engine.save_checkpoint, wrong)),
            ("save_16bit_model: save_dir is", partial(engine.save_16bit_model, wrong)),
            ("save_on_signal: save_dir is", partial(engine.save_on_signal, wrong)),
            ("load_pretrained: path is", partial(dsrun.zero.load_pretrained, engine.module, wrong)),
            ("load_checkpoint: ", partial(engine.load_checkpoint, wrong)),
        ):
            if (wrong, who) != (b"run", "load_pretrained: path is"):
                with pytest.raises(InputError, match=who):
                    call()
    with pytest.raises(InputError, match="save_checkpoint: save_dir is empty"):
        engine.save_checkpoint(Named(""))
    assert sorted(os.listdir(place)) == ["run", "w.safetensors"]


def test_any_path_like_names_a_folder_a_file_or_a_tag_and_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, _paths, str(tmp_path))
