"""`dsrun completion`: the script by which a shell completes verbs, options and ids of jobs. Prints it only."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_VARIABLE = "_DSRUN_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the script that completes dsrun's words in a shell.

    \b
    Put it where the shell looks for it:
      bash  ~/.local/share/bash-completion/completions/dsrun
      zsh   a file `_dsrun` in a folder of $fpath
      fish  ~/.config/fish/completions/dsrun.fish
    """
    made = get_completion_class(shell)
    assert made is not None, f"click knows {shell}"
    # The text alone: click's `source()` starts the shell to ask for its version.
    complete = made(ctx.find_root().command, {}, "dsrun", _VARIABLE)
    click.echo(complete.source_template % complete.source_vars())
    return 0
