"""A checkpoint that DeepSpeed saved, for the load of an engine: as one of dsrun's, while it is loaded.

Rank 0 reads DeepSpeed's files and writes them beside as one file of boxes; all ranks then load that as they load any.
The files are pickles, and are read by torch's restricted reader: nothing in them is run, see `convert/pickles.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dsrun.checkpoint_files.folder.scratch import scratch_folder
from dsrun.checkpoint_files.index.value import ROLES_OF_NO_OPTIMIZER
from dsrun.checkpoint_files.storage.deepspeed_tags import is_deepspeed_tag
from dsrun.checkpoint_files.storage.places import Place
from dsrun.errors import CheckpointError, DsrunError, Problem
from dsrun.units import format_bytes

from ...checkpoint.convert.deepspeed import read_deepspeed
from ...checkpoint.convert.foreign import ForeignCheckpoint
from ...checkpoint.convert.write import write
from ...checkpoint.format.tags import first_ranks_text
from ...mesh.agree.all_or_none import all_or_none
from ...mesh.agree.same import largest
from ...optim.states.of_run import SCALAR
from .load import LoadOptions
from .run_state import RunState

_WHERE = "load_checkpoint"


@contextmanager
def converted_from_deepspeed(
    run: RunState, chosen: Place | None, options: LoadOptions, *, where: str, progress: Callable[[], None]
) -> Generator[Place | None]:
    """Yields the folder to load instead of `chosen`, or None where that is none of DeepSpeed's.

    Every rank must call and leave it after the load: then rank 0 removes what it has written. Enters one all-reduce,
    and where there is something to convert an all-gather.

    Args:
        run: State that the checkpoint is to replace.
        chosen: checkpoint that this rank would load; None: there is none.
        options: options that say which state is loaded.
        where: folder in which the checkpoint was looked for, for messages.
        progress: Function that is called while files are written.

    Raises:
        CheckpointError: on every rank, where rank 0 cannot read or write it, or it has another optimizer's states. Of
            the load itself, with `chosen` for the folder that was written.
    """
    device = run.mesh.device
    is_theirs = chosen is not None and is_deepspeed_tag(chosen)
    (found,) = largest([float(is_theirs)], run.collectives, device=device, label="whose checkpoint")
    if not found:
        yield None
        return
    with ExitStack() as writing:

        def convert() -> str:
            if not is_theirs or not isinstance(chosen, Path):
                raise CheckpointError(
                    f"{where if chosen is None else chosen}: other ranks have a checkpoint of DeepSpeed's there",
                    hint="give every rank the same folder, which all hosts share",
                )
            if run.collectives.rank != 0:
                return ""
            try:
                folder = writing.enter_context(scratch_folder(chosen.parent, "from-deepspeed"))
                contents = _contents(run, chosen, options)
                nbytes = write(contents, folder, chosen.name, progress=progress)
            except OSError as error:
                raise CheckpointError(
                    f"{chosen}: it is DeepSpeed's, and is written beside as one of dsrun's to be loaded, which fails: "
                    f"{error.filename or chosen.parent}: {error.strerror or error}",
                    hint=f"`dsrun checkpoint import --trust-pickle {chosen} OUT`, where there is room, and load OUT",
                ) from error
            for text in contents.left:
                print(f"dsrun: {chosen}: not taken over: {text}", flush=True)
            print(
                f"dsrun: {chosen} is DeepSpeed's, and is loaded by way of {format_bytes(nbytes)} beside it", flush=True
            )
            return folder.name

        name = all_or_none(convert, run.collectives, device=device, label="convert", where=_WHERE)
        name = first_ranks_text(name, run.collectives, device=device)
        assert chosen is not None, "else some rank has raised"
        try:
            yield chosen.parent / name / chosen.name
        except CheckpointError as error:
            raise _without(error, f"{name}/") from error.__cause__


def _without(error: CheckpointError, written: str) -> DsrunError:
    """Leaves out the folder that was written, of whichever rank: it is gone when somebody reads the message."""
    problems = [
        Problem(one.message.replace(written, ""), one.hint and one.hint.replace(written, "")) for one in error.problems
    ]
    return type(error).of(problems)


def _contents(run: RunState, chosen: Path, options: LoadOptions) -> ForeignCheckpoint:
    """Reads it. Which optimizer and schedule it is of, DeepSpeed's files do not say, and DeepSpeed does not compare."""
    contents = read_deepspeed(chosen, ignored=())
    if run.update.optimizer is not None:
        if options.optimizer and contents.groups:
            _check_states(run, contents, chosen)
        contents.optimizer = type(run.update.optimizer).__name__
    if contents.scheduler is not None and run.update.scheduler is not None:
        contents.scheduler["type"] = type(run.update.scheduler).__name__
    if not options.optimizer:
        contents.tensors = [one for one in contents.tensors if one.role in ROLES_OF_NO_OPTIMIZER]
    return contents


def _check_states(run: RunState, contents: ForeignCheckpoint, chosen: Path) -> None:
    """Compares the states with those that the run's optimizer makes: they are what tells of the class.

    Raises:
        CheckpointError: they are others.
    """
    saved = {one.role.removeprefix(SCALAR) for one in contents.tensors} - ROLES_OF_NO_OPTIMIZER
    mine = run.update.shards.saved.made_states()
    # Some classes count steps for each parameter, and others for each group.
    saved, mine = (names - {"step"} for names in (saved, mine))
    if saved != mine:
        raise CheckpointError(
            f"{chosen}: its optimizer states are {_listed(saved)}; "
            f"this run's optimizer, {type(run.update.optimizer).__name__}, has {_listed(mine)}",
            hint="use the optimizer that it was trained with, or pass load_optimizer_states=False",
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"
