"""`python -m dsrun.as_deepspeed [-m] SCRIPT [ARGS]`: runs a script as plain python would, with dsrun as `deepspeed`.

For one process, or for ranks that another launcher starts; `dsrun --as-deepspeed` starts ranks itself.
"""

from __future__ import annotations

import sys

from dsrun.errors import DsrunError, UsageError

from .search_path import SITE, variables
from .version import wanted_version


def main() -> None:
    """Runs what the command line names, in this process.

    Raises:
        SystemExit: as the script asked, or 2 where nothing can be run.
    """
    import os

    from dsrun.launcher.agent.start import bootstrap

    words = sys.argv[1:]
    kind = "script"
    if words[:1] == ["-m"]:
        kind, words = "module", words[1:]
    try:
        if not words or words[0].startswith("-"):
            raise UsageError(
                "python -m dsrun.as_deepspeed: no script is named",
                hint=f"`python -m dsrun.as_deepspeed train.py`; ranks of another launcher: PYTHONPATH={SITE}",
            )
        os.environ.update(variables(os.environ, wanted_version(os.environ)))
    except DsrunError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if not getattr(sys.flags, "safe_path", False):
        # The working folder, which `-m` has put there: the script's own folder comes in its place.
        del sys.path[0]
    bootstrap.run(kind, words[0], words[1:])


if __name__ == "__main__":
    main()
