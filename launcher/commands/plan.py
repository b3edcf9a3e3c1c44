"""`dsrun plan`: options -> model, settings, machine -> a prediction on stdout. The arithmetic is in dsrun.estimate."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
    from dsrun.estimate.search import Choice

_T = TypeVar("_T")

#: What is planned without a config; the stage is then chosen.
_NO_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
#: Where the config leaves the number of stages to a script that has not run.
_WRITE_STAGES = "write the number of stages that the script's PipelineModule has, if it has one"


@click.command("plan")
@click.option("--config", metavar="FILE", help="Training config; without it bf16, AdamW, the fastest stage that fits.")
@click.option("--model", "other_model", metavar="MODEL", help="Model of the script, where MODEL is a script.")
@click.option("--gpus", metavar="[NxM]GPU", help="GPUs to plan for, e.g. `8xH100-80G`; without it this machine.")
@click.option("-H", "--hostfile", metavar="FILE", help="Hosts to plan for; GPUs by --gpus, else as on this machine.")
@click.option("-n", "--ranks", type=click.IntRange(1, MAX_SLOTS), metavar="N", help="Ranks on one host.")
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
    from dsrun.estimate.prediction import predict
    from dsrun.estimate.search import fastest, what_if

    from ..estimate.machine import find_machine
    from ..estimate.text import describe_choices, describe_prediction, prediction_json

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
    checked = _attempt(problems, lambda: _config(config))
    if machine is None or size is None or checked is None or problems:
        raise UsageError.of(problems)
    settings = _settings(checked, size, machine, seq=seq, micro=micro, recompute=recompute)
    if picture is not None:
        return _draw(settings, picture)
    if fit:
        return _print_fit(checked, fastest(size, settings, machine), settings)
    if all_choices:
        predictions = what_if(size, settings, machine)
        if as_json:
            click.echo(json.dumps([prediction_json(prediction) for prediction in predictions], indent=2))
        else:
            click.echo("\n".join(describe_choices(predictions)))
        return 0
    if config is None:
        settings = _fastest_stage(size, settings, machine)
    prediction = predict(size, settings, machine)
    if as_json:
        click.echo(json.dumps(prediction_json(prediction), indent=2))
    else:
        click.echo("\n".join(describe_prediction(prediction)))
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


def _config(path: str | None) -> Config:
    from dsrun.config.findings import Code, Severity, errors_of
    from dsrun.config.load import inspect

    inspection = inspect(_NO_CONFIG if path is None else path, keep_planned=True)
    if inspection.config is None:
        # What is planned is no fault here; only the other errors stand in the way.
        faults = [finding for finding in inspection.findings if finding.code is not Code.PLANNED]
        error = errors_of([finding for finding in faults if finding.severity is Severity.ERROR])
        assert error is not None, "a config is missing only where an error says why"
        raise error
    return inspection.config


def _settings(
    config: Config,
    size: ModelSize,
    machine: Machine,
    *,
    seq: int | None,
    micro: int | None,
    recompute: Literal["none", "blocks"] | None,
) -> RunSettings:
    from dataclasses import replace

    from dsrun.config.buckets import resolve_buckets
    from dsrun.config.config import OPEN_STAGES, has_open_stages
    from dsrun.estimate.run.settings import read_settings

    longest = None
    if size.architecture is not None:
        config = resolve_buckets(config, size.architecture.hidden)
        longest = size.architecture.max_positions
    is_open = has_open_stages(config)
    try:
        settings = read_settings(
            config, ranks=machine.ranks, sequence=seq, micro_batch=micro, recompute=recompute, longest=longest
        )
    except ConfigError as error:
        if not is_open:
            raise
        assumed = Problem(f"{config.source}: {OPEN_STAGES}", _WRITE_STAGES)
        raise ConfigError.of([*error.problems, assumed]) from error
    notes = (f"{OPEN_STAGES}; {_WRITE_STAGES}",) if is_open else ()
    return replace(settings, notes=(*settings.notes, *notes))


def _fastest_stage(size: ModelSize, settings: RunSettings, machine: Machine) -> RunSettings:
    from dataclasses import replace

    from dsrun.estimate.search import fastest

    choice = fastest(size, settings, machine, pipelines=False)
    stage = settings.stage if choice is None else choice.prediction.settings.stage
    reason = "none fits" if choice is None else "the fastest that fits"
    note = f"no `--config`: bf16 with AdamW, at stage {stage} ({reason})"
    return replace(settings, stage=stage, notes=(note, *settings.notes))


def _draw(settings: RunSettings, path: str) -> int:
    """Writes a picture of the pipeline's schedule to a file, or as text to stdout."""
    from dsrun.estimate.time.pipeline import schedule_of
    from dsrun.pipeline_schedules.picture import svg_of, text_of

    if settings.stages == 1:
        raise UsageError(
            "`--schedule` draws a pipeline's schedule, and the config has one stage",
            hint='give `--config` a file with "pipeline": {"stages": 4}, say',
        )
    if path != "-" and not path.endswith(".svg"):
        raise UsageError(f"`--schedule` is `{path}`; expected a name that ends in .svg, or `-`")
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


def _print_fit(config: Config, choice: Choice | None, settings: RunSettings) -> int:
    from dsrun.config.show.migrate import dump
    from dsrun.units import format_duration

    from ..estimate.text import verdict

    blocked = [key for key in settings.planned if ".offload_" not in key]
    if blocked:
        raise UsageError(
            f"the config asks for {', '.join(f'`{key}`' for key in blocked)}, which this version does not build yet",
            hint="leave that out, or see with `--what-if` what it would need",
        )
    if choice is None:
        raise UsageError(
            "no stage and micro batch fits",
            hint="`--what-if` shows by how much; more ranks, `--recompute blocks` or a shorter `--seq` need less",
        )
    prediction = choice.prediction
    chosen = prediction.settings
    document = _changed(config.raw, chosen, had_train_batch=config.train_batch_size is not None)
    click.echo(dump(document), nl=False)
    seconds = prediction.step.seconds
    time = "" if seconds is None else f", a step of at least {format_duration(seconds)}"
    changed = ", ".join(f"`{key}` {value}" for key, value in choice.changes) or "nothing to change"
    if chosen.stages > 1 and chosen.stages != settings.stages:
        changed += "; the script trains with `engine.train_batch`"
    by_script = ", where the script recomputes its blocks" if chosen.recompute == "blocks" else ""
    click.echo(f"dsrun: {verdict(prediction)}{by_script}{time}; {changed}", err=True)
    return 0


def _changed(raw: dict[str, Any], chosen: RunSettings, *, had_train_batch: bool) -> dict[str, Any]:
    """Returns the config as written, with the chosen stage, pipeline and batch; offload leaves it."""
    document: dict[str, Any] = dict(raw)
    zero = {
        key: value for key, value in dict(raw.get("zero_optimization") or {}).items() if not key.startswith("offload_")
    }
    document["zero_optimization"] = {**zero, "stage": chosen.stage}
    if chosen.stages > 1:
        document["pipeline"] = _pipeline_changed(dict(raw.get("pipeline") or {}), chosen)
    else:
        document.pop("pipeline", None)
    document["train_micro_batch_size_per_gpu"] = chosen.micro_batch
    document["gradient_accumulation_steps"] = chosen.accumulation_steps
    if not had_train_batch:
        document.pop("train_batch_size", None)
    return document


def _pipeline_changed(section: dict[str, Any], chosen: RunSettings) -> dict[str, Any]:
    """Returns the section as written, with the chosen stages, chunks and schedule."""
    for name in ("stages", "schedule", "virtual_stages", "partition"):
        section.pop(name, None)
    chunks = {"virtual_stages": chosen.chunks_per_rank} if chosen.chunks_per_rank > 1 else {}
    partition = {} if chosen.partition == "cost" else {"partition": chosen.partition}
    return {"stages": chosen.stages, "schedule": chosen.schedule, **chunks, **partition, **section}
