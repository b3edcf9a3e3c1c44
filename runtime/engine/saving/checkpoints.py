"""Checkpoints of an engine: which one is meant, what ends before it is loaded, and where a run goes on.

What goes into one, and in which order, is `persist.py`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from dsrun.checkpoint_files.folder.latest import doubt_of_latest
from dsrun.checkpoint_files.folder.own_saves import wait_for_own_saves
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.contract.environment import stands_for_deepspeed
from dsrun.contract.heartbeats import SCRIPT_PHASE, HeartbeatWriter

from ...checkpoint.format.tags import one_tag, tag_text
from ...mesh.agree.all_or_none import all_or_none
from ...observe.records import RecordWriter
from ...zero.hooks.modules import UnitHooks
from ..compose.saving import Saving
from ..model.guard import ModelGuard
from ..model.ownership import note_outcome
from .from_deepspeed import converted_from_deepspeed
from .load import CheckedCheckpoint, LoadOptions, check_same, examine, take_over
from .memory_copies import CopiesInMemory
from .persist import save_engine
from .resume import choose_checkpoint
from .resume_state import LastMoment, ResumeState
from .run_state import RunState

T = TypeVar("T")
#: A script's `save_dir` or `load_dir`, and its tag.
Folder = str | os.PathLike[str]
Tag = str | int | os.PathLike[str]


class Checkpoints:
    """Saves and loads everything that a run needs to go on; every rank must call each method.

    Args:
        run: State that is saved and loaded.
        saving: Writer of checkpoints, and the checkpoint that a job which was started again goes on from.
        moment: Random numbers and position in the data since the last update.
        copies: Copies in memory, which may be newer than a checkpoint.
        hooks: Hooks of the units, which let go of parameters before a load.
        guard: Guard of the model, which finds parameters that have been moved.
        heartbeat: Writer of what this rank does, for the launcher that watches it.
        records: Writer of records, for saved checkpoints.
        check_states: Function that refuses a call, named by its argument, while states are offloaded.
    """

    def __init__(
        self,
        run: RunState,
        saving: Saving,
        moment: LastMoment,
        copies: CopiesInMemory,
        *,
        hooks: UnitHooks,
        guard: ModelGuard,
        heartbeat: HeartbeatWriter,
        records: RecordWriter,
        check_states: Callable[[str], None],
    ) -> None:
        self._run = run
        self._saver = saving.saver
        self._resume = saving.resume
        self._moment = moment
        self._copies = copies
        self._hooks = hooks
        self._guard = guard
        self._heartbeat = heartbeat
        self._records = records
        self._check_states = check_states
        self._as_deepspeed = stands_for_deepspeed()
        self._universal = bool((run.config.get("checkpoint") or {}).get("load_universal"))

    def save(
        self, save_dir: Folder, tag: Tag | None, client_state: Mapping[str, Any], *, save_latest: bool, frozen: bool
    ) -> None:
        """Saves a checkpoint, see `Engine.save_checkpoint`."""
        run = self._run
        folder = place_given(save_dir, who="save_checkpoint: save_dir")
        self._heartbeat.beat(phase="save checkpoint")
        self._check_states("engine.save_checkpoint")
        run.access.torn.check("engine.save_checkpoint")
        self._guard.check_memory()
        run.settle()
        save_engine(
            run,
            self._saver,
            self._records,
            folder,
            tag=one_tag(
                f"global_step{run.progress.counters.global_steps}" if tag is None else tag_text(tag),
                run.collectives,
                device=run.mesh.device,
                where_they_differ=self._saver.policy.where_tags_differ,
            ),
            moment=self._moment_to_save(),
            client_state=client_state,
            save_latest=save_latest,
            frozen=frozen,
            progress=self._heartbeat.beat,
        )
        self._heartbeat.beat(phase=SCRIPT_PHASE)

    def _moment_to_save(self) -> ResumeState:
        steps = self._run.progress.micro_steps_done
        if steps and self._run.mesh.info.rank == 0:
            print(
                f"save_checkpoint: the micro steps since the last update ({steps}) are not in it; "
                "a resumed run takes them again",
                flush=True,
            )
        return self._moment.to_save()

    def wait(self) -> None:
        """Returns when no checkpoint is being written any more, see `Engine.wait_for_checkpoint`."""
        self._heartbeat.beat(phase="save checkpoint")
        self._saver.finish(self._heartbeat.beat)
        self._copies.wait()
        self._heartbeat.beat(phase=SCRIPT_PHASE)

    def check(self) -> None:
        """Raises what became of a save that went on behind training.

        Raises:
            CheckpointError: it has failed.
        """
        self._saver.check()

    def close(self) -> None:
        """Ends the writer, once the last checkpoint is written.

        Raises:
            CheckpointError: it could not be saved, and the script was not told so far.
        """
        self._saver.close(self._heartbeat.beat)

    def load(
        self,
        load_dir: Folder | None,
        tag: Tag | None,
        options: LoadOptions,
        *,
        module_only: bool,
        missing_ok: bool,
        wait: Callable[[], None],
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint, see `Engine.load_checkpoint`.

        Args:
            load_dir: Folder of checkpoints; None in a job that was started again.
            tag: Name of the checkpoint in it; None for the latest.
            options: Parts of it that are taken over.
            module_only: Whether only parameters and buffers are.
            missing_ok: Whether it may be missing.
            wait: `wait_for_checkpoint` of the engine, which a script may have wrapped.
        """
        choose = partial(self._choose, load_dir, tag, missing_ok=missing_ok)
        with ExitStack() as reading:
            return self._load(load_dir, tag, options, reading, choose, wait=wait, module_only=module_only)

    def _load(
        self,
        load_dir: Folder | None,
        tag: Tag | None,
        options: LoadOptions,
        reading: ExitStack,
        choose: Callable[..., Place | None],
        *,
        wait: Callable[[], None],
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        run = self._run
        copy, uses_copies = None, tag is None and not module_only and self._copies.are_made
        chosen = self._together(partial(self._begin_load, choose, wait, any_ok=uses_copies))
        if uses_copies:
            copy = self._copies.find(chosen)
        converted = None
        if copy is None and self._as_deepspeed:
            converted = reading.enter_context(
                converted_from_deepspeed(run, chosen, options, where=str(load_dir), progress=self._heartbeat.beat)
            )

        def look() -> CheckedCheckpoint | None:
            target = converted or (choose() if copy is None else copy.folder)
            if target is None:
                return None
            self._heartbeat.beat(phase="load checkpoint")
            if copy is None:
                reading.enter_context(held(target))  # no other job removes it meanwhile
            return examine(run, target, options, copy=None if copy is None else copy.index)

        found = self._together(look)
        if copy is None:
            check_same(run, found, where=str(load_dir))
        if found is None:
            return None, None
        if copy is None and converted is None and load_dir is not None and tag is None and chosen != self._resume:
            self._tell_doubt(found.target.parent, found.target.name)
        run.settle()
        # A forward without a backward may still hold parameters, and gradients of before would be added to those after.
        self._hooks.find_failed()
        self._hooks.before_step()
        self._guard.check_memory()
        run.access.writes.take_over()
        run.sharded.reducer.drop_strays()
        run.sharded.reducer.zero()
        run.progress.restart_batch()
        take_over(run, found, progress=self._heartbeat.beat)
        if run.progress.last is not None and copy is None and not module_only:
            self._copies.forget()
        self._moment.note()
        note_outcome(run.update.optimizer, overflow=False, loss_scale=run.update.loss_scale.value)
        self._heartbeat.beat(step=run.progress.counters.global_steps, phase=SCRIPT_PHASE)
        run.mesh.where.at(*run.progress.present_step)
        return str(found.target if converted is None else chosen), found.client_state

    def _choose(self, load_dir: Folder | None, tag: Tag | None, *, missing_ok: bool) -> Place | None:
        folder = None if load_dir is None else place_given(load_dir, who="load_checkpoint: load_dir", to="load from")
        resume = self._resume
        looked_in = folder if folder is not None else resume
        if looked_in is not None:
            wait_for_own_saves(looked_in, progress=self._heartbeat.beat)
        return choose_checkpoint(
            folder,
            None if tag is None else tag_text(tag),
            resume=resume,
            missing_ok=missing_ok,
            universal=self._universal,
        )

    def _begin_load(
        self, choose: Callable[..., Place | None], wait: Callable[[], None], *, any_ok: bool
    ) -> Place | None:
        """Ends what a load must not meet, and returns the checkpoint on the disk that is meant."""
        wait()
        self._check_states("engine.load_checkpoint")
        return choose(missing_ok=True) if any_ok else choose()

    def _tell_doubt(self, folder: Place, tag: str) -> None:
        """Says on rank 0 where `latest` may not name what it was set to."""
        doubt = doubt_of_latest(folder, tag) if self._run.mesh.info.rank == 0 else None
        if doubt is not None:
            print(f"dsrun: {doubt}; `tag=` loads another one", flush=True)

    def _together(self, work: Callable[[], T]) -> T:
        run = self._run
        return all_or_none(work, run.collectives, device=run.mesh.device, label="load", where="load_checkpoint")
