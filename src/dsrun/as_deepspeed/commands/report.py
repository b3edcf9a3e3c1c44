"""`ds_report`: says what `deepspeed` is here, then what `dsrun probe` says of this machine. Compiles nothing."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import dsrun
from dsrun.errors import DsrunError

from ..search_path import SITE
from ..version import STANDARD, full_version, wanted_version


def head(version: str) -> list[str]:
    """Returns the lines that say what `deepspeed` is.

    Args:
        version: version that dsrun stands for.
    """
    return [
        f"deepspeed is dsrun {dsrun.__version__}: {full_version(version)} by its metadata, in {SITE}",
        "no operation is compiled: what DeepSpeed's op builders are for is in torch, or in dsrun itself",
        f"complete for DeepSpeed {STANDARD} where docs/reference/deepspeed-api.md says so; "
        "`dsrun doctor` runs a trial job",
        "",
    ]


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Prints the report, as scripts ask for it in the middle of their run; reads no words of theirs.

    Args:
        hide_operator_status: Whether the line about compiled operations is left out.
        hide_errors_and_warnings: DeepSpeed's argument, without effect: they are of its compiler, and there is none.

    Raises:
        InputError: No version can be told as the user wishes.
    """
    from dsrun.launcher.cli import app

    lines = head(wanted_version(os.environ))
    print("\n".join([lines[0], *lines[2:]] if hide_operator_status else lines), flush=True)
    app.main(args=["probe"], prog_name="dsrun", standalone_mode=False)


def cli_main() -> NoReturn:
    """Prints the report for the words of this process, and exits as `dsrun probe` does."""
    from dsrun.launcher.cli import main as run

    try:
        lines = head(wanted_version(os.environ))
    except DsrunError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    print("\n".join(lines), flush=True)
    run(["probe", *sys.argv[1:]])


if __name__ == "__main__":
    cli_main()
