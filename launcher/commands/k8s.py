"""`dsrun k8s`: a run as a manifest for a Kubernetes cluster with JobSet. Prints it, and talks to no cluster."""

from __future__ import annotations

import json
import sys

import click

from dsrun.errors import UsageError

from ..option_words import parse_count
from ..run_words import check_run_words, divide
from ..scheduler.jobset import JobSetSettings, check_settings, job_set, name_after

_PODS = "the pods are the hosts: `-- --nodes N` says how many"
_FROM_HERE = "each pod starts its own ranks, and none is reached from here"
#: Options of the run that have no sense here, and why.
_SENSELESS = {
    "--dry-run": "it prints a manifest, and starts nothing",
    **dict.fromkeys(("--hostfile", "--include", "--exclude", "--nodes", "--node-rank"), _PODS),
    **dict.fromkeys(("--master-addr", "--master-port"), "pods meet at the first one"),
    **dict.fromkeys(("--transport", "--ssh-config", "--accept-new-host-keys", "--sync", "--no-preflight"), _FROM_HERE),
    "--max-restarts": "the JobSet starts pods again: `-- --max-restarts N`",
}


class _OptionsLast(click.Command):
    """Its own options stand behind the last `--`: what is before is another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the words behind the last `--` as options, and all before it as arguments."""
        words, options = divide(args)
        asks = [word for word in words[:1] if word in ctx.help_option_names]
        return super().parse_args(ctx, [*options, *asks, "--", *words])


@click.command("k8s", cls=_OptionsLast)
@click.option("--nodes", type=parse_count, default="1", show_default=True, metavar="N", help="Pods, one a host.")
@click.option("--gpus", type=parse_count, default="0", show_default=True, metavar="N", help="GPUs of each pod.")
@click.option("--image", metavar="IMAGE", help="Container image with dsrun and SCRIPT in it; needed.")
@click.option("--name", metavar="NAME", help="Of the JobSet.  [default: after SCRIPT]")
@click.option("--namespace", metavar="NAME", help="Where it belongs.  [default: kubectl's]")
@click.option(
    "--max-restarts", type=parse_count, default="0", show_default=True, metavar="N", help="Start all pods again."
)
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON in place of YAML.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]... -- OPTIONS...")
@click.pass_context
def command(
    ctx: click.Context,
    nodes: int,
    gpus: int,
    image: str | None,
    name: str | None,
    namespace: str | None,
    max_restarts: int,
    as_json: bool,
    words: tuple[str, ...],
) -> int:
    """Print a JobSet that runs `dsrun run SCRIPT ARGS` on N pods.

    Words before SCRIPT are options of `dsrun run`; those below stand behind the last `--`:

    \b
      dsrun k8s train.py -- --nodes 2 --gpus 8 --image IMG | kubectl apply -f -

    SCRIPT and its files are those of the image. The cluster needs the JobSet controller (jobset.sigs.k8s.io).
    """
    run = check_run_words(ctx, words, files_are_here=False, senseless=_SENSELESS)
    if image is None:
        raise UsageError("`--image` is missing", hint="`dsrun k8s train.py -- --image registry/name:tag`")
    settings = JobSetSettings(
        name=name_after(run.script) if name is None else name,
        image=image,
        nodes=nodes,
        gpus=gpus,
        namespace=namespace,
        max_restarts=max_restarts,
        grace_s=run.grace_s,
    )
    check_settings(settings)
    manifest = job_set(words, settings)
    if as_json:
        click.echo(json.dumps(manifest, indent=2))
    else:
        import yaml

        yaml.safe_dump(manifest, sys.stdout, sort_keys=False, width=1000)
    return 0
