"""What an engine offers of checkpoints: which one is meant, what is let go before it is loaded, where a run goes on.

What goes into one, and in which order, is `persist.py`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import optim

from dsrun.checkpoint_files.folder.latest import doubt_of_latest
from dsrun.checkpoint_files.folder.own_saves import wait_for_own_saves
from dsrun.checkpoint_files.folder.removal import held
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.config.batch import BatchSizes
from dsrun.config.sections.checkpoint import Checkpoint
from dsrun.errors import InputError

from ...activation.configured import named_generators
from ...checkpoint.format.policy import SavePolicy
from ...checkpoint.format.tags import one_tag, tag_text
from ...checkpoint.memory_copy.restore import Restored
from ...mesh.agree.all_or_none import all_or_none
from ..model_guard import Taken
from ..ownership import note_outcome
from ..parts import SCRIPT_PHASE, EngineParts
from ..state import Counters
from ..step import StepResult
from .load import Examined, LoadWishes, check_same, examine, take_over
from .persist import save_engine
from .resume import choose_checkpoint
from .resume_state import Moment, present_moment

T = TypeVar("T")


def policy_of_saving(section: Checkpoint) -> SavePolicy:
    """Returns what a config's section says of saving."""
    return SavePolicy(
        asynchronous=section.asynchronous,
        later=section.asynchronous and section.when_copied == "behind",
        when_busy=section.when_busy,
        keep_last=section.keep_last,
        keep_every=section.keep_every,
        timeout_s=section.timeout,
        where_tags_differ=section.tag_validation,
        frozen_by_reference=section.frozen_parameters == "reference",
    )


class Checkpoints:
    """Saves and loads everything that a run needs to go on; every rank must call each method."""

    _parts: EngineParts
    _check_states_here: Callable[[str], None]
    _counters: Counters
    _micro_steps_done: int
    _backward_done: bool
    _taken: Taken
    _boundary: bool | None
    _last: StepResult | None
    _find_copy: Callable[[Place | None], Restored | None]
    _moment: Moment | None
    _batch: BatchSizes
    optimizer: optim.Optimizer | None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | os.PathLike[str] | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything needed to go on, on any number of ranks and at any stage; every rank must call.

        In the middle of a global batch, what there was after the last update: see [Note: between updates] in
        `resume_state.py`.

        Unless the config says `checkpoint.asynchronous` false, training goes on while the checkpoint is written:
        `latest` names it once it is complete, and `wait_for_checkpoint` waits for that. The end of the script does too.

        Args:
            save_dir: checkpoint folder, shared by all ranks, or an address such as `s3://bucket/run`. None, which
                DeepSpeed's own call cannot take either, is refused.
            tag: name inside it; `global_step<N>` by default. Where ranks give different ones, rank 0's is taken, see
                `checkpoint.tag_validation`.
            client_state: JSON values and tensors that `load_checkpoint` returns; rank 0's are stored.
            save_latest: let `latest` name this tag.
            exclude_frozen_parameters: leave parameters out that are not trained.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is None, empty, no path, or an address of nothing.
            CheckpointError: on every rank, if one rank could not save, or an earlier save has failed since; nothing
                was published. What goes wrong later is raised by `step`, the next save or load, or `destroy`.
        """
        folder = place_given(save_dir, who="save_checkpoint: save_dir")
        self._parts.heartbeat.beat(phase="save checkpoint")
        self._check_states_here("engine.save_checkpoint")
        self._parts.torn.check("engine.save_checkpoint")
        self._taken.check_memory()
        if self._parts.step.away is not None:
            self._parts.step.away.settle()
        save_engine(
            self._parts,
            self._counters,
            folder,
            tag=one_tag(
                f"global_step{self._counters.global_steps}" if tag is None else tag_text(tag),
                self._parts.collectives,
                device=self._parts.mesh.device,
                where_they_differ=self._parts.saver.policy.where_tags_differ,
            ),
            moment=self._moment_to_save(),
            client_state=client_state or {},
            save_latest=save_latest,
            frozen=not exclude_frozen_parameters,
        )
        self._parts.heartbeat.beat(phase=SCRIPT_PHASE)
        return True

    def _note_moment(self) -> None:
        """Keeps what a checkpoint needs that is saved before the next update, see [Note: between updates]."""
        counted = self._boundary is None and self._batch.accumulation_steps == 1
        self._moment = None if counted else self._present_moment()

    def _moment_to_save(self) -> Moment:
        if not self._micro_steps_done:
            return self._present_moment()
        if self._parts.mesh.info.rank == 0:
            print(
                f"save_checkpoint: the micro steps since the last update ({self._micro_steps_done}) are not in it; "
                "a resumed run takes them again",
                flush=True,
            )
        return self._present_moment() if self._moment is None else self._moment

    def _present_moment(self) -> Moment:
        parts = self._parts
        return present_moment(
            self._parts.mesh.device, named_generators(), parts.loader, micro_steps=self._counters.micro_steps
        )

    def _tell_doubt(self, folder: Place, tag: str) -> None:
        """Says on rank 0 where `latest` may not name what it was set to."""
        doubt = doubt_of_latest(folder, tag) if self._parts.mesh.info.rank == 0 else None
        if doubt is not None:
            print(f"dsrun: {doubt}; `tag=` loads another one", flush=True)

    def wait_for_checkpoint(self) -> None:
        """Returns when no checkpoint is being written any more, nor a copy in memory; enters no collective.

        Raises:
            CheckpointError: the last one could not be saved, and the script was not told so far.
        """
        self._parts.heartbeat.beat(phase="save checkpoint")
        self._parts.saver.finish(self._parts.heartbeat.beat)
        if self._parts.copies is not None:
            self._parts.copies.wait()
        self._parts.heartbeat.beat(phase=SCRIPT_PHASE)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | int | os.PathLike[str] | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        *,
        missing_ok: bool = False,
        load_random_state: bool = True,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint that any number of ranks saved at any stage; every rank must call.

        Args:
            load_dir: checkpoint folder or address; may be left out in a job that was started again.
            tag: name inside it. By default the one that a job which was started again goes on from, if it lies in
                `load_dir`, else the one that `latest` names.
            load_module_strict: tensors of the checkpoint that the model does not have are an error.
            load_optimizer_states: take over optimizer states and hyperparameters.
            load_lr_scheduler_states: take over the schedule.
            load_module_only: take over parameters and buffers alone.
            custom_load_fn: not taken, for it would see a rank's slices.
            missing_ok: return (None, None) where there is no checkpoint yet, instead of an error.
            load_random_state: have this process's random numbers go on as well, see `resume_state.py`; the last thing
                before training, then. On more ranks than there were, new ones draw numbers of their own.

        What this job itself is still writing there, by any engine, is waited for first.

        Where a job that was started again has a copy in memory (`checkpoint.memory_copy`) that is newer than what
        would be loaded, the first call without `tag` and `load_module_only` goes on from that.

        Returns:
            the tag's folder, or that of the copy in memory, and the client state it was saved with.

        Raises:
            InputError: there is nothing to choose by: no `load_dir`, and the job was not started again; or it is an
                address of nothing.
            CheckpointError: on every rank, where one of them finds none, or one that is damaged or of another model.
                Nothing was changed then, and training may go on; unless a file turns out damaged while it is read.
                After that forward, backward, `step` and saving are refused until a load has succeeded.
        """
        if custom_load_fn is not None:
            raise InputError(
                "load_checkpoint: custom_load_fn is given, and parameters may lie in slices",
                hint="read the weights yourself and pass them to engine.load_module_state_dict",
            )
        with ExitStack() as reading:
            return self._load(
                load_dir,
                tag,
                LoadWishes(
                    strict=load_module_strict,
                    optimizer=load_optimizer_states and not load_module_only,
                    scheduler=load_lr_scheduler_states and not load_module_only,
                    progress=not load_module_only,
                    random=load_random_state and not load_module_only,
                ),
                reading,
                module_only=load_module_only,
                missing_ok=missing_ok,
            )

    def _load(
        self,
        load_dir: str | os.PathLike[str] | None,
        tag: str | int | os.PathLike[str] | None,
        wishes: LoadWishes,
        reading: ExitStack,
        *,
        module_only: bool,
        missing_ok: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        choose = partial(self._choose, load_dir, tag, missing_ok=missing_ok)
        copy, uses_copies = None, tag is None and not module_only and self._parts.copies is not None
        chosen = self._together(partial(self._begin_load, choose, any_ok=uses_copies))
        if uses_copies:
            copy = self._find_copy(chosen)

        def look() -> Examined | None:
            target = choose() if copy is None else copy.folder
            if target is None:
                return None
            self._parts.heartbeat.beat(phase="load checkpoint")
            if copy is None:
                reading.enter_context(held(target))  # no other job removes it meanwhile
            return examine(self._parts, target, wishes, copy=None if copy is None else copy.index)

        found = self._together(look)
        if copy is None:
            check_same(self._parts, found, where=str(load_dir))
        if found is None:
            return None, None
        if copy is None and load_dir is not None and tag is None and found.target != self._parts.resume:
            self._tell_doubt(found.target.parent, found.target.name)
        if self._parts.step.away is not None:
            self._parts.step.away.settle()
        # A forward without a backward may still hold parameters, and gradients of before would be added to those after.
        self._parts.hooks.before_step()
        self._taken.check_memory()
        if self._parts.step.writes is not None:
            self._parts.step.writes.take_over()
        self._parts.step.reducer.zero()
        self._micro_steps_done = 0
        self._backward_done = False
        take_over(self._parts, self._counters, found)
        if self._parts.copies is not None and self._last is not None and copy is None and not module_only:
            self._parts.copies.forget()
        self._note_moment()
        note_outcome(self.optimizer, overflow=False, loss_scale=self._parts.loss_scale.value)
        self._parts.heartbeat.beat(step=self._counters.global_steps, phase=SCRIPT_PHASE)
        self._parts.mesh.where.at(self._counters.global_steps + 1, 1)
        return str(found.target), found.client_state

    def _choose(
        self,
        load_dir: str | os.PathLike[str] | None,
        tag: str | int | os.PathLike[str] | None,
        *,
        missing_ok: bool,
    ) -> Place | None:
        folder = None if load_dir is None else place_given(load_dir, who="load_checkpoint: load_dir", to="load from")
        resume = self._parts.resume
        looked_in = folder if folder is not None else resume
        if looked_in is not None:
            wait_for_own_saves(looked_in, progress=self._parts.heartbeat.beat)
        return choose_checkpoint(folder, None if tag is None else tag_text(tag), resume=resume, missing_ok=missing_ok)

    def _begin_load(self, choose: Callable[..., Place | None], *, any_ok: bool) -> Place | None:
        """Ends what a load must not meet, and returns the checkpoint on the disk that is meant."""
        self.wait_for_checkpoint()
        self._check_states_here("engine.load_checkpoint")
        return choose(missing_ok=True) if any_ok else choose()

    def _together(self, work: Callable[[], T]) -> T:
        parts = self._parts
        return all_or_none(work, parts.collectives, device=parts.mesh.device, of="load", where="load_checkpoint")
