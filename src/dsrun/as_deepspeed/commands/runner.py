"""`deepspeed [OPTIONS] SCRIPT [ARGS]`: runs `dsrun run --as-deepspeed` with the words that mean the same.

Reads the hostfile and `.deepspeed_env`, says what it does, and becomes dsrun. What the words mean is `translate`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dsrun.errors import DsrunError, InputError
from dsrun.launcher.hosts.hostfile import read_hostfile
from dsrun.launcher.machine.proc_files import host_names
from dsrun.launcher.plan.env_file import DEEPSPEED_ENVIRONMENT_NAME
from dsrun.launcher.plan.environment import LIBRARY_PREFIXES, instead_of
from dsrun.launcher.scheduler.registry import find_job

from .exported import exported_files, read_exported
from .options import Options, parse
from .translate import Surroundings, Translation, translate

#: Beginnings of variables that ranks of all hosts get from here. Scripts append to the list before they call `main`.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
#: Names of variables that the line shows; accelerate's file has all of an environment.
_MOST_SHOWN = 4


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits.

    Args:
        args: words after `deepspeed`; None for those of this process.
    """
    try:
        options = parse(sys.argv[1:] if args is None else args)
        translation = prepare(options)
        _enter(translation)
    except DsrunError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if not translation.quiet:
        for note in translation.notes:
            print(f"dsrun: deepspeed: {note}", file=sys.stderr)
        print(f"dsrun: deepspeed: runs `{shown(translation.words, options)}`", file=sys.stderr, flush=True)
    from dsrun.__main__ import main as run

    sys.argv[1:] = translation.words
    run()


def prepare(options: Options) -> Translation:
    """Reads what the words name, puts the variables of `.deepspeed_env` into this process, and translates.

    Args:
        options: words as they were typed.

    Raises:
        InputError: carries what is wrong with the words, the hostfile or the file of variables.
    """
    hosts = read_hostfile(Path(options.hostfile)) if os.path.isfile(options.hostfile) else None
    exported, ours = dict[str, str](), list[str]()
    if hosts is not None and not options.no_ssh:
        files = exported_files(DEEPSPEED_ENVIRONMENT_NAME, home=Path.home(), folder=Path.cwd())
        exported, ours = read_exported(files)
        exported = _begun_so(os.environ) | exported
    names = host_names()
    around = Surroundings(
        hosts=hosts,
        local_names=names,
        in_job=hosts is None and find_job(os.environ, local_names=names) is not None,
        environ=os.environ,
        python_folder=Path(sys.executable).parent,
        exported=tuple(exported),
    )
    translation = translate(options, around)
    if translation.exports:
        # As `--env NAME`, which copies from here: values may be secret, and words are for all to see.
        os.environ.update(exported)
    if ours and translation.exports and not translation.quiet:
        print(f"dsrun: deepspeed: {DEEPSPEED_ENVIRONMENT_NAME}: dsrun's to set: {', '.join(ours)}", file=sys.stderr)
    return translation


def _begun_so(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that `EXPORT_ENVS` means, but those of which dsrun itself knows what other hosts get."""
    begun = {name: value for name, value in environ.items() if name.startswith(tuple(EXPORT_ENVS))}
    known = ("DSRUN_", *LIBRARY_PREFIXES)
    return {name: value for name, value in begun.items() if not name.startswith(known) and instead_of(name) is None}


def shown(words: Sequence[str], options: Options) -> str:
    """Returns the command as a line to read: of many variables some, and no word of the script's.

    Args:
        words: words after `dsrun`.
        options: words as they were typed.
    """
    own = list(words[: len(words) - len(options.user_args)])
    names = [at for at, word in enumerate(own) if word == "--env" and "=" not in own[at + 1]]
    text = shlex.join(["dsrun", *own])
    if len(names) > _MOST_SHOWN:
        first, last = names[0], names[-1] + 2
        count = f"--env ... ({len(names)} variables)"
        text = f"{shlex.join(['dsrun', *own[:first]])} {count} {shlex.join(own[last:])}"
    return f"{text} ..." if options.user_args else text


def _enter(translation: Translation) -> None:
    """Makes this process what the translation says, so that those that it starts are."""
    for name in translation.unset:
        del os.environ[name]
    if translation.cores is not None:
        try:
            os.sched_setaffinity(0, translation.cores)
        except OSError as error:
            raise InputError(
                f"deepspeed: `--bind_core_list`: this process cannot use these cores: {error.strerror}",
                hint="`dsrun probe` shows the cores that there are",
            ) from error


if __name__ == "__main__":
    main()
