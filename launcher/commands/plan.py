"""`dsrun plan`: options -> model, settings, machine -> a prediction on stdout. The arithmetic is in dsrun.estimate."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from dsrun.errors import ConfigError, InputError, Problem, UsageError

from ..hosts.hostfile import MAX_SLOTS
from ..jobs.folder import jobs_folder

if TYPE_CHECKING:
    from dsrun.config.config import Config
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.run.machine import Machine
    from dsrun.estimate.run.settings import RunSettings
    from dsrun.estimate.search.changes import Free

_T = TypeVar("_T")

#: What is planned without a config; the stage is then chosen.
_NO_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


@click.command("plan")
@click.option("--config", metavar="FILE", help="Training config; without it bf16, AdamW, the fastest stage that fits.")
@click.option("--model", "other_model", metavar="MODEL", help="Model of the script, where MODEL is a script.")
@click.option("--gpus", metavar="[NxM]GPU", help="GPUs to plan for, e.g. `8xH100-80G`; without it this machine.")
@click.option("-H", "--hostfile", metavar="FILE", help="Hosts to plan for; GPUs by --gpus, else as on this machine.")
@click.option("-n", "--ranks", type=click.IntRange(1, MAX_SLOTS), metavar="N", help="Ranks on one host.")
@click.option(
    "--axes", metavar="SIZES", help="Sizes of axes in place of the config's: `t8p4`, with d, t, p, v, m, u or c."
)
@click.option("--seq", type=click.IntRange(min=1), metavar="N", help="Tokens of a sample.  [default: 4096]")
@click.option(
    "--micro", type=click.IntRange(min=1), metavar="N", help="Samples of a forward, in place of the config's."
)
@click.option(
    "--recompute", type=click.Choice(["none", "blocks"]), help="What of the activations is computed again in backward."
)
@click.option(
    "--trained", metavar="COUNT", help="Parameters that are trained, e.g. `40M` for adapters; others are frozen."
)
@click.option("--host-memory", metavar="SIZE", help="Memory of a host, e.g. `1T`.")
@click.option("--nvme", metavar="SIZE", help="Space for offloading on a host, e.g. `7T`.")
@click.option(
    "--speed",
    multiple=True,
    metavar="PATH=N",
    help="A speed that is known better: GB/s of memory, peer, network, pcie, ddr, nvme_read or nvme_write; "
    "TFLOP/s of flops. Repeatable.",
)
@click.option("--what-if", "all_choices", is_flag=True, help="Compare every stage and offload.")
@click.option("--fit", is_flag=True, help="Print the config that fits with the highest predicted speed.")
@click.option(
    "--schedule",
    "picture",
    metavar="FILE.svg",
    help="Write a picture of the pipeline's schedule, and nothing else; `-` prints it as text.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("model", metavar="MODEL")
def command(
    model: str,
    config: str | None,
    other_model: str | None,
    gpus: str | None,
    hostfile: str | None,
    ranks: int | None,
    axes: str | None,
    seq: int | None,
    micro: int | None,
    recompute: Literal["none", "blocks"] | None,
    trained: str | None,
    host_memory: str | None,
    nvme: str | None,
    speed: tuple[str, ...],
    all_choices: bool,
    fit: bool,
    picture: str | None,
    as_json: bool,
) -> int:
    """Predict memory by tier and the shortest step, before anything runs.

    \b
    MODEL is
      7B, 350M           a number of parameters
      config.json        of a transformers model, or the folder it is in
      module:callable    called without arguments on torch's meta device
      train.py           what the script trained in its last run with dsrun;
                         before there is one, add `--model`
    """
    from dsrun.config.show.migrate import dump
    from dsrun.estimate.prediction import predict
    from dsrun.estimate.search.nearest import nearest
    from dsrun.estimate.search.what_if import what_if, what_if_axes

    from ..estimate.choices_text import describe_choices, describe_layouts, describe_misfit, nearest_json
    from ..estimate.fitted_config import fitted_config
    from ..estimate.machine import find_machine
    from ..estimate.text import describe_prediction, prediction_json

    if fit and all_choices:
        raise UsageError("`--fit` and `--what-if` exclude each other", hint="leave one of them out")
    if picture is not None and (fit or all_choices or as_json):
        raise UsageError("`--schedule` goes with none of `--fit`, `--what-if` and `--json`", hint="run it by itself")
    problems: list[Problem] = []
    size = _attempt(problems, lambda: _model(model, other_model, trained))
    machine = _attempt(
        problems,
        lambda: find_machine(
            gpus=gpus, hostfile=hostfile, ranks=ranks, host_memory=host_memory, nvme=nvme, speeds=speed
        ),
    )
    sizes = _attempt(problems, lambda: _axes(axes))
    checked = _attempt(problems, lambda: _config(config, sizes or {}, axes))
    if machine is None or size is None or checked is None or sizes is None or problems:
        raise UsageError.of(problems)
    # Which sizes leave that many data ranks is for the search to find.
    held = {letter: number for letter, number in sizes.items() if letter != "d"} if fit else sizes
    read = partial(_settings, size=size, machine=machine, sizes=held, seq=seq, micro=micro, recompute=recompute)
    checked, notes = (checked, ()) if fit else _with_open_axes(checked, size, machine, sizes, read, micro=micro)
    settings = read(_without_batch(checked) if fit and checked.train_batch_size is not None else checked)
    settings = replace(settings, notes=(*notes, *settings.notes))
    if picture is not None:
        return _draw(settings, picture)
    if fit:
        document, said = fitted_config(checked, size, settings, machine, free=_free(sizes, recompute), axes=sizes)
        click.echo(dump(document), nl=False)
        click.echo(f"dsrun: {said}", err=True)
        return 0
    if all_choices:
        predictions, layouts = what_if(size, settings, machine), what_if_axes(size, settings, machine)
        if as_json:
            tables = {"stages": predictions, "layouts": [prediction for rows in layouts for prediction in rows]}
            told = [{"table": name, **prediction_json(row)} for name, rows in tables.items() for row in rows]
            click.echo(json.dumps(told, indent=2))
        else:
            table = describe_layouts(layouts)
            click.echo("\n".join([*describe_choices(predictions), *([""] if table else []), *table]))
        return 0
    if config is None:
        settings = _fastest_stage(size, settings, machine)
    prediction = predict(size, settings, machine)
    near = nearest(size, settings, machine, most_ranks=0) if prediction.fits is False else []
    if as_json:
        click.echo(json.dumps({**prediction_json(prediction), "nearest": nearest_json(near)}, indent=2))
    else:
        misfit = describe_misfit(prediction, near)
        click.echo("\n".join([*describe_prediction(prediction), *([""] if misfit else []), *misfit]))
    return 0


def _attempt(problems: list[Problem], step: Callable[[], _T]) -> _T | None:
    """Returns what `step` returns, or None after noting what it found wrong."""
    try:
        return step()
    except InputError as error:
        problems += error.problems
        return None


def _model(text: str, other: str | None, trained: str | None) -> ModelSize:
    from dsrun.estimate.model.units import parse_count

    from ..estimate.model import find_model

    is_script = text.endswith(".py")
    if other is not None and not is_script:
        raise UsageError(f"MODEL `{text}` and `--model {other}` both name a model", hint="`--model` goes with a script")
    if other is not None and not Path(text).is_file():
        raise UsageError(f"MODEL {text}: file not found")
    size = find_model(other if other is not None else text, jobs=[jobs_folder(os.environ)])
    if trained is None:
        return size
    numel = parse_count(trained)
    if numel is None:
        raise UsageError(f"`--trained` is `{trained}`; expected a count like `40M`")
    return size.with_trained(numel)


def _axes(text: str | None) -> dict[str, int]:
    from ..estimate.config_changes import parse_axes

    return {} if text is None else parse_axes(text)


def _config(path: str | None, sizes: Mapping[str, int], axes: str | None) -> Config:
    from dsrun.config.findings import Code, Severity, errors_of
    from dsrun.config.load import inspect, inspect_tree
    from dsrun.config.text.tree import from_plain

    from ..estimate.config_changes import with_axes

    inspection = inspect(_NO_CONFIG if path is None else path, keep_planned=True)
    if inspection.config is not None and sizes:
        name = f"`--axes {axes}`" if path is None else f"{path} with `--axes {axes}`"
        inspection = inspect_tree(from_plain(with_axes(inspection.config.raw, sizes), name), name, keep_planned=True)
    if inspection.config is None:
        # What is planned is no fault here; only the other errors stand in the way.
        faults = [finding for finding in inspection.findings if finding.code is not Code.PLANNED]
        error = errors_of([finding for finding in faults if finding.severity is Severity.ERROR])
        assert error is not None, "a config is missing only where an error says why"
        raise error
    return inspection.config


def _without_batch(config: Config) -> Config:
    """Returns the config with one sample a rank: whose samples of an update are divided is for a search to find."""
    from dsrun.config.load import inspect_tree
    from dsrun.config.text.tree import from_plain

    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    raw = {key: value for key, value in config.raw.items() if key != "train_batch_size"} | sizes
    found = inspect_tree(from_plain(raw, config.source), config.source, keep_planned=True).config
    assert found is not None, "the config has been taken with another batch"
    return found


def _with_open_axes(
    config: Config,
    size: ModelSize,
    machine: Machine,
    sizes: Mapping[str, int],
    read: Callable[[Config], RunSettings],
    *,
    micro: int | None,
) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with the sizes that it leaves to a plan, and a line that says which."""
    from dsrun.config.axes import open_axes
    from dsrun.config.load import inspect_tree
    from dsrun.config.text.tree import from_plain

    keys = open_axes(config)
    if not keys:
        return config, ()
    from dsrun.estimate.search.open_axes import plan_open_axes

    from ..estimate.open_axes import planned_text

    def reread(planned: Mapping[str, int]) -> Config | None:
        # With `--micro` the config's own batch need not come out, nor where it has none and one sample is assumed.
        has_batch = (config.train_batch_size, config.train_micro_batch_size_per_gpu) != (None, None)
        ranks = machine.ranks if has_batch and micro is None and "c" not in sizes else None
        tree = from_plain(config.raw, config.source)
        return inspect_tree(tree, config.source, world_size=ranks, keep_planned=True, planned=planned).config

    found = plan_open_axes(config, size, machine, reread=reread, settings_of=read)
    if found is None:
        return config, ()
    planned = reread(found.sizes)
    assert planned is not None, "these sizes were taken before"
    return planned, (planned_text(found, keys),)


def _settings(
    config: Config,
    *,
    size: ModelSize,
    machine: Machine,
    sizes: Mapping[str, int],
    seq: int | None,
    micro: int | None,
    recompute: Literal["none", "blocks"] | None,
) -> RunSettings:
    from dsrun.config.axes import assumed_sizes

    from ..estimate.settings import settings_of

    try:
        settings = settings_of(config, size, ranks=machine.ranks, sequence=seq, micro_batch=micro, recompute=recompute)
    except ConfigError as error:
        if not (assumed := assumed_sizes(config)):
            raise
        problem = Problem(f"{config.source}: {assumed}", "write numbers in place of `auto`")
        raise ConfigError.of([*error.problems, problem]) from error
    return _checked_axes(_with_ring(settings, sizes, machine), sizes, machine)


def _with_ring(settings: RunSettings, sizes: Mapping[str, int], machine: Machine) -> RunSettings:
    """Returns the settings with a ring, which no key of a config sizes; samples of a data rank stay."""
    from dsrun.config.axes import divide

    ring = sizes.get("c", 1)
    if ring == 1:
        return settings
    axes = {**settings.axis_sizes, "ring": ring}
    divide(machine.ranks, axes)
    return replace(settings, axis_sizes=axes, planned=(*settings.planned, "--axes c"))


def _checked_axes(settings: RunSettings, sizes: Mapping[str, int], machine: Machine) -> RunSettings:
    """Returns the settings if there are as many data ranks as `--axes` says.

    Raises:
        UsageError: there are not.
    """
    data = settings.ranks_of("batch", machine.ranks)
    if data != sizes.get("d", data):
        others = "".join(f" beside {name} {size}" for name, size in settings.axis_sizes.items() if size > 1)
        raise UsageError(
            f"`--axes` says d{sizes['d']}; {machine.ranks} ranks leave {data}{others}",
            hint=f"leave d out, or plan for {machine.ranks // data * sizes['d']} ranks",
        )
    return settings


def _fastest_stage(size: ModelSize, settings: RunSettings, machine: Machine) -> RunSettings:
    from dsrun.estimate.search.fastest import fastest

    from ..estimate.text import taken_speeds_text

    # Of axes that are planned alone too: whether this version runs it is told elsewhere.
    choice = fastest(size, replace(settings, planned=()), machine, free={"stage"})
    stage = settings.stage if choice is None else choice.prediction.settings.stage
    reason = "none fits" if choice is None else f"the fastest that fits{taken_speeds_text(choice.prediction)}"
    note = f"no `--config`: bf16 with AdamW, at stage {stage} ({reason})"
    return replace(settings, stage=stage, notes=(note, *settings.notes))


def _draw(settings: RunSettings, path: str) -> int:
    """Writes a picture of the pipeline's schedule to a file, or as text to stdout."""
    from dsrun.estimate.time.pipeline import schedule_of
    from dsrun.pipeline_schedules.picture import most_micros, svg_of, text_of

    if settings.stages == 1:
        raise UsageError(
            "`--schedule` draws a pipeline's schedule, and the config has one stage",
            hint='give `--config` a file with "pipeline": {"stages": 4}, say',
        )
    if path != "-" and not path.endswith(".svg"):
        raise UsageError(f"`--schedule` is `{path}`; expected a name that ends in .svg, or `-`")
    most = most_micros(settings.schedule, ranks=settings.stages, virtual=settings.chunks_per_rank)
    if settings.accumulation_steps > most:
        raise UsageError(
            f"`--schedule {path}` draws at most {most} micro batches of {settings.schedule} on {settings.stages} "
            f"stages; an update has {settings.accumulation_steps}",
            hint=f"draw fewer, for they repeat: `--axes m{min(most, 4 * settings.stages)}`, beside the sizes you give",
        )
    schedule = schedule_of(settings)
    if path == "-":
        click.echo(text_of(schedule), nl=False)
        return 0
    try:
        Path(path).write_text(svg_of(schedule), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--schedule {path}: {error.strerror}") from error
    click.echo(f"dsrun: {path}: {schedule.name}, {schedule.ranks} stages, {schedule.micros} micro batches", err=True)
    return 0


def _free(sizes: Mapping[str, int], recompute: str | None) -> frozenset[Free]:
    """Returns what a search may change: all that no option says."""
    from dsrun.estimate.search.changes import EVERYTHING

    by_letter: dict[str, Free] = {"t": "tensor", "p": "pipe", "v": "schedule", "m": "batch"}
    held = {what for letter, what in by_letter.items() if letter in sizes}
    return EVERYTHING - held - ({"recompute"} if recompute is not None else set())
