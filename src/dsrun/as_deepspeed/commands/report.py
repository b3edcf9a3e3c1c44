"""`ds_report`: says what `deepspeed` is here, then what `dsrun probe` says of this machine. Compiles nothing."""

from __future__ import annotations

import sys
from typing import NoReturn

import dsrun

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


def main() -> NoReturn:
    """Prints the report and exits as `dsrun probe` does."""
    import os

    from dsrun.errors import DsrunError
    from dsrun.launcher.cli import main as run

    try:
        lines = head(wanted_version(os.environ))
    except DsrunError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    print("\n".join(lines), flush=True)
    run(["probe", *sys.argv[1:]])


if __name__ == "__main__":
    main()
