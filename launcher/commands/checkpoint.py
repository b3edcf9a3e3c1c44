"""`dsrun checkpoint`: looks at checkpoints, converts and removes them. What it knows stands in checkpoint_files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.errors import CheckpointError, Problem, UsageError
from dsrun.units import format_bytes

from ..options.types import parse_path, parse_size

if TYPE_CHECKING:  # loaded by the verb that uses it
    from dsrun.checkpoint_files.storage.places import Place

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_PATH = click.argument("path", type=parse_path, metavar="PATH")


@click.group("checkpoint")
def command() -> None:
    """Look at checkpoints, check, compare, convert and remove them.

    PATH is the folder of one checkpoint (`checkpoints/global_step200`), or the one they are saved in
    (`checkpoints`), whose latest is meant; or an address of either in an object store (`s3://bucket/run`).
    """


@command.command("ls")
@_JSON
@click.argument("folder", type=parse_path, metavar="FOLDER", default=".")
def ls(folder: str, as_json: bool) -> int:
    """List the checkpoints in FOLDER, oldest first.

    \b
    State:
      complete  index and files are there, with the sizes they had
      torn      the save was interrupted, or is under way
      damaged   the index cannot be read, or a file is missing or cut off
    `dsrun checkpoint verify` reads every byte.
    """
    from dsrun.checkpoint_files.folder.latest import doubt_of_latest
    from dsrun.checkpoint_files.folder.listing import list_tags, named_by_latest, refusal_of_latest
    from dsrun.checkpoint_files.storage.registry import place_of

    from ._checkpoint_text import notes, tag_json, tags_table

    tags = list_tags(place_of(folder))
    latest = named_by_latest(place_of(folder))
    if as_json:
        body = {"schema_version": 1, "folder": folder, "latest": latest, "tags": [tag_json(tag) for tag in tags]}
        click.echo(json.dumps(body, indent=2))
        return 0
    if tags:
        click.echo("\n".join(tags_table(tags, now=time.time())))
    _say(*notes(tags))
    if (refusal := refusal_of_latest(place_of(folder))) is not None:
        _say(refusal)
    if not tags:
        _say(f"no checkpoints in {folder}")
    elif latest is not None and latest not in {tag.name for tag in tags}:
        _say(f"`latest` names {latest!r}, which is not there")
    elif latest is not None and (doubt := doubt_of_latest(place_of(folder), latest)) is not None:
        _say(doubt)
    return 0


@command.command("show")
@_JSON
@click.option("--config", "config_only", is_flag=True, help="Print the training config alone, as JSON, for `diff`.")
@click.option("--tensors", is_flag=True, help="List every tensor too.")
@_PATH
def show(path: str, as_json: bool, config_only: bool, tensors: bool) -> int:
    """Show what a checkpoint holds and which run it is of."""
    from dsrun.checkpoint_files.folder.find import find_tag
    from dsrun.checkpoint_files.folder.listing import saved_at
    from dsrun.checkpoint_files.parse import read_index
    from dsrun.checkpoint_files.reference import sharers
    from dsrun.checkpoint_files.storage.registry import place_of

    from ._checkpoint_text import columns, index_json, index_text

    target = find_tag(place_of(path))
    index = read_index(target)
    saved = saved_at(target)
    shared = sharers(target, index) if isinstance(target, Path) else {}
    if config_only:
        click.echo(json.dumps(index.values.get("config"), indent=2, sort_keys=True))
    elif as_json:
        click.echo(json.dumps({"schema_version": 1, **index_json(target, index, saved=saved, shared=shared)}, indent=2))
    else:
        click.echo("\n".join(index_text(target, index, saved=saved, now=time.time(), shared=shared)))
        if tensors:
            rows = [
                (name, role, stored.dtype, "x".join(map(str, stored.shape)) or "-")
                for (name, role), stored in index.tensors.items()
            ]
            click.echo("\n".join(["", *columns([("NAME", "ROLE", "DTYPE", "SHAPE"), *rows])]))
    return 0


@command.command("verify")
@click.option("--all", "every", is_flag=True, help="PATH is a folder of checkpoints: read all of them.")
@_JSON
@_PATH
def verify(path: str, every: bool, as_json: bool) -> int:
    """Read every byte of a checkpoint and compare checksums; exit code 1 if anything is wrong.

    Names the file and the tensors of everything that is damaged, missing or cut off.
    """
    from dsrun.checkpoint_files.folder.find import find_tag
    from dsrun.checkpoint_files.folder.listing import list_tags
    from dsrun.checkpoint_files.storage.registry import place_of

    place = place_of(path)
    targets = [place / tag.name for tag in list_tags(place)] if every else [find_tag(place)]
    found = {target: _problems(target) for target in targets}
    if as_json:
        report = [{"path": str(target), "ok": not said, "problems": said} for target, said in found.items()]
        click.echo(json.dumps({"schema_version": 1, "checkpoints": report}, indent=2))
    else:
        for target, said in found.items():
            if not said:
                click.echo(f"{target}: ok")
    problems = [Problem(text) for said in found.values() for text in said]
    if problems and not as_json:
        raise CheckpointError.of(problems)
    return CheckpointError.exit_code if problems else 0


@command.command("rm")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="Of a folder of checkpoints keep the N newest."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@click.argument("paths", nargs=-1, required=True, type=parse_path, metavar="PATH...")
def rm(paths: Sequence[str], keep_last: int | None, dry_run: bool) -> int:
    """Remove checkpoints: PATH is each one's own folder, or the folder they are in with `--keep-last`.

    What is no checkpoint is refused, and so is a link. `latest` names the newest complete one that is left.
    With `--keep-last`, the one that `latest` names stays as well, and older ones that were never complete go.
    """
    from dsrun.checkpoint_files.folder.listing import list_tags
    from dsrun.checkpoint_files.folder.remove import check_removable, outnumbered, remove
    from dsrun.checkpoint_files.storage.calls import FileCalls
    from dsrun.checkpoint_files.storage.registry import place_of

    chosen = [place_of(path) for path in paths]
    if keep_last is not None:
        if len(chosen) != 1:
            raise UsageError("`--keep-last` takes one folder of checkpoints")
        chosen = [chosen[0] / tag.name for tag in outnumbered(list_tags(chosen[0]), keep_last)]
    check_removable(chosen)
    by_folder: dict[Place, set[str]] = {}
    for path in chosen:
        resolved = path.resolve() if isinstance(path, Path) else path
        by_folder.setdefault(resolved.parent, set()).add(resolved.name)
    for path in chosen:
        click.echo(str(path))
    if not dry_run:
        for folder, names in by_folder.items():
            changed = remove(folder, names, calls=FileCalls())
            if changed is not None:
                _say(f"`latest` names {changed} now" if changed else f"no complete checkpoint is left in {folder}")
    count = sum(map(len, by_folder.values()))
    _say(f"{count} checkpoint{'' if count == 1 else 's'} {'would be ' if dry_run else ''}removed")
    return 0


@command.command("diff")
@_JSON
@click.option("--values-only", is_flag=True, help="Compare config, counters and options, and read no tensors.")
@click.argument("first", type=parse_path, metavar="A")
@click.argument("second", type=parse_path, metavar="B")
def diff(first: str, second: str, as_json: bool, values_only: bool) -> int:
    """Compare two checkpoints; exit code 1 if they differ, 0 if they do not.

    Tensors are compared element by element, however many ranks saved them: how many differ, and the largest absolute
    difference. Then the config, counters, options of the optimizer and all other values.
    """
    from dsrun.checkpoint_files.folder.find import find_tag
    from dsrun.checkpoint_files.folder.removal import held
    from dsrun.checkpoint_files.parse import read_index
    from dsrun.checkpoint_files.storage.registry import place_of
    from dsrun.checkpoint_files.verbs.compare import comparable, tensor_differences, value_differences

    from ._checkpoint_text import differences_json, differences_text

    targets = find_tag(place_of(first)), find_tag(place_of(second))
    reading = "diff: reading {}"
    with held(targets[0]), held(targets[1]):
        a, b = ((target, read_index(target)) for target in targets)
        values = list(value_differences(comparable(a[1]), comparable(b[1])))
        tensors = (
            [] if values_only else list(tensor_differences(a, b, progress=lambda name: _progress(reading.format(name))))
        )
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **differences_json(targets, tensors, values)}, indent=2))
    elif tensors or values:
        click.echo("\n".join(differences_text(tensors, values)))
    else:
        _say(f"{targets[0]} and {targets[1]} are the same")
    return 1 if tensors or values else 0


@command.command("export")
@click.option("--to", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp32", "stored"]), default="bf16", show_default=True)
@click.option(
    "--max-shard-size", type=parse_size, metavar="SIZE", default="5GB", show_default=True, help="Of a safetensors file."
)
@_PATH
@click.argument("out", type=parse_path, metavar="OUT")
def export(path: str, out: str, to: str, dtype: str, max_shard_size: int) -> int:
    """Write the weights of a checkpoint to OUT, for other programs.

    \b
    safetensors  OUT is a folder; it gets model.safetensors, or shards and
                 model.safetensors.index.json, as Hugging Face's loaders read them
    torch        OUT is a file with one state dict, for torch.load
    Parameters are rounded to DTYPE; buffers stay as they were stored. The model is never whole in memory.
    """
    from dsrun.checkpoint_files.folder.find import find_tag
    from dsrun.checkpoint_files.folder.removal import held
    from dsrun.checkpoint_files.parse import read_index
    from dsrun.checkpoint_files.storage.calls import FileCalls
    from dsrun.checkpoint_files.storage.registry import place_of
    from dsrun.checkpoint_files.verbs.export import export as write

    from ._checkpoint_child import torch_file

    target = find_tag(place_of(path))
    kind = {"bf16": "BF16", "fp32": "F32", "stored": None}[dtype]

    def write_to(folder: Path, shard_bytes: int | None) -> list[Path]:
        reading = "export: reading {}"
        return write(
            target,
            read_index(target),
            folder,
            dtype=kind,
            shard_bytes=shard_bytes,
            calls=FileCalls(),
            progress=lambda name: _progress(reading.format(target / name)),
        )

    with held(target):
        if to == "torch":
            files = [torch_file(_local(out, "OUT"), lambda folder: write_to(folder, None)[0])]
        else:
            files = write_to(_local(out, "OUT"), max_shard_size)
    for file in files:
        click.echo(f"{file}  {format_bytes(file.stat().st_size)}")
    return 0


@command.command("import")
@click.option("--tag", metavar="TAG", help="Name of the new checkpoint.  [default: global_step<N>]")
@click.option("--trust-pickle", is_flag=True, help="Read pickles; without it nothing is imported.")
@click.option(
    "--ignore", multiple=True, metavar="NAME", help="A class or function that a pickle names: read as nothing."
)
@click.option("--optimizer", metavar="CLASS", help="The run's optimizer, where the files do not say: AdamW, Lion, ...")
@click.option("--buffer", multiple=True, metavar="NAME", help="A tensor of torch's that is a buffer, not a parameter.")
@click.argument("source", type=parse_path, metavar="SOURCE")
@click.argument("out", type=parse_path, metavar="OUT")
def import_(
    source: str,
    out: str,
    tag: str | None,
    trust_pickle: bool,
    ignore: Sequence[str],
    optimizer: str | None,
    buffer: Sequence[str],
) -> int:
    """Make a checkpoint in OUT of one of DeepSpeed's or torch's in SOURCE, to go on from it with dsrun.

    \b
    DeepSpeed  a folder with `latest`, or a tag's: ZeRO stages 0 to 3 of any
               number of ranks, or a universal one
    torch      a folder of torch.distributed.checkpoint: model and optimizer

    fp32 weights, optimizer states, counters, the schedule and JSON values of the client state are taken over.

    Pickles are read by torch's restricted reader, and DeepSpeed's classes as plain data: nothing in them is run. What
    that does not read is refused by name.
    """
    from ._checkpoint_child import import_checkpoint

    _local(source, "SOURCE")
    words = [*(["--tag", tag] if tag is not None else []), *(["--trust-pickle"] if trust_pickle else [])]
    words += [word for name in ignore for word in ("--ignore", name)]
    words += [word for name in buffer for word in ("--buffer", name)]
    words += ["--optimizer", optimizer] if optimizer is not None else []
    click.echo(import_checkpoint([*words, "--", source, out]), nl=False)
    return 0


def _local(text: str, what: str) -> Path:
    """Returns the path that a word means, where an object store will not do."""
    from dsrun.checkpoint_files.storage.registry import place_of

    place = place_of(text)
    if not isinstance(place, Path):
        raise UsageError(f"{what} is {text}; expected a path", hint="name a folder, and copy from or to the store")
    return place


def _problems(target: Place) -> list[str]:
    """Returns everything that is wrong with a checkpoint, saying on a terminal which file it is at."""
    from dsrun.checkpoint_files.folder.removal import held
    from dsrun.checkpoint_files.folder.verify import verify as problems_of
    from dsrun.checkpoint_files.parse import read_index

    with held(target):
        try:
            index = read_index(target)
        except CheckpointError as error:
            return [problem.message for problem in error.problems]
        return list(problems_of(target, index, progress=lambda name: _progress(f"verify: reading {target / name}")))


def _progress(text: str) -> None:
    """Says on a terminal what is being waited for."""
    if sys.stderr.isatty():
        click.echo(f"dsrun: {text}", err=True)


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(f"dsrun: {line}", err=True)
