"""DeepSpeed's further commands, which dsrun has not: each says what does the like here, and fails. Runs nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from dsrun.errors import Problem, UsageError

#: Name of the command: what is said of it, and what to do.
REFUSED: Mapping[str, Problem] = {
    "ds_bench": Problem(
        "ds_bench: DeepSpeed's benchmark of collectives is not here",
        "`dsrun probe --bench -H HOSTFILE` measures memory, disks, GPUs and the network of hosts",
    ),
    "ds_elastic": Problem(
        "ds_elastic: there is no elastic batch to be printed, for a checkpoint loads at any number of ranks",
        "deepspeed.elasticity.compute_elastic_config computes one",
    ),
    "ds_io": Problem(
        "ds_io: DeepSpeed's benchmark of drives is not here",
        "`dsrun nvme bench DIR` finds the fastest settings of the section `aio` for a folder",
    ),
    "ds_nvme_tune": Problem(
        "ds_nvme_tune: DeepSpeed's search for settings of drives is not here",
        "`dsrun nvme bench DIR` finds the fastest settings of the section `aio` for a folder",
    ),
    "ds_ssh": Problem(
        "ds_ssh: no command is run on hosts by itself",
        "`dsrun -H HOSTFILE --ranks-per-host 1 --no-python COMMAND` runs one on each",
    ),
}


def main() -> NoReturn:
    """Says what there is in the place of the command that was called, and exits."""
    error = UsageError.of([REFUSED[os.path.basename(sys.argv[0])]])
    print(error.render(), file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
