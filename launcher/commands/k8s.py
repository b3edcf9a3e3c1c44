"""`dsrun k8s`: a run as a manifest for a Kubernetes cluster with JobSet. Prints it, and talks to no cluster."""

from __future__ import annotations

import json
import sys

import click

from dsrun.errors import UsageError

from ..options.resubmit_args import check_run_words, divide
from ..options.types import parse_count, parse_file
from ..scheduler.jobset import JobSetSettings, check_settings, job_set, name_after, pod_of, words_for_gpus
from ..scheduler.pod_resources import Quality, quality_of

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
#: What Kubernetes does to pods of a class that jobs are not in by intention.
_POOR: dict[Quality, str] = {
    "BestEffort": "evicts them first and gives them the least processor time: name `--cpus N --memory SIZE`",
    "Burstable": "evicts them before those that name both: name `--cpus N --memory SIZE`",
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
@click.option("--cpus", metavar="N", help="Cores of each pod, reserved.")
@click.option("--memory", metavar="SIZE", help="Memory of each pod, reserved, like 900Gi.")
@click.option("--shm", metavar="SIZE", help="Most of it in /dev/shm.  [default: all]")
@click.option("--resource", "resources", multiple=True, metavar="NAME=N", help="Of each pod, like rdma/hca=1.")
@click.option("--ipc-lock", is_flag=True, help="Let ranks lock memory.  [default: with rdma]")
@click.option("--host-network", is_flag=True, help="Pods use their nodes' network.")
@click.option("--pod-patch", type=parse_file, metavar="FILE", help="YAML that is merged into the pods' template.")
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
    cpus: str | None,
    memory: str | None,
    shm: str | None,
    resources: tuple[str, ...],
    ipc_lock: bool,
    host_network: bool,
    pod_patch: str | None,
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
      dsrun k8s train.py -- --nodes 2 --gpus 8 --cpus 96 --memory 900Gi \\
          --image IMG | kubectl apply -f -

    SCRIPT and its files are those of the image. The cluster needs the JobSet controller (jobset.sigs.k8s.io).
    """
    run = check_run_words(ctx, words, files_are_here=False, senseless=_SENSELESS)
    if image is None:
        raise UsageError("`--image` is missing", hint="`dsrun k8s train.py -- --image registry/name:tag`")
    settings = JobSetSettings(
        name=name_after(run.script, nodes) if name is None else name,
        image=image,
        nodes=nodes,
        gpus=gpus,
        namespace=namespace,
        max_restarts=max_restarts,
        grace_s=run.grace_s,
        cpus=cpus,
        memory=memory,
        shm=shm,
        resources=resources,
        ipc_lock=ipc_lock,
        host_network=host_network,
        patch=None if pod_patch is None else _read_patch(pod_patch),
        patch_source=pod_patch or "",
    )
    check_settings(settings)
    more = words_for_gpus(gpus, ranks_per_host=run.ranks_per_host, backend=run.backend)
    manifest = job_set([*more, *words], settings)
    if as_json:
        click.echo(json.dumps(manifest, indent=2))
    else:
        import yaml

        yaml.safe_dump(manifest, sys.stdout, sort_keys=False, width=1000)
    quality = quality_of(pod_of(manifest))
    if quality in _POOR and (pod_patch is None or quality == "BestEffort"):
        click.echo(f"warning: the pods are {quality} to Kubernetes, which {_POOR[quality]}", err=True)
    return 0


def _read_patch(path: str) -> object:
    """Returns what the file says, whatever that is.

    Raises:
        UsageError: it is no YAML.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            patch = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: is no YAML: {reason}", hint="one document, with the fields to change") from error
    # An empty file is not the same as no file.
    return {} if patch is None else patch
