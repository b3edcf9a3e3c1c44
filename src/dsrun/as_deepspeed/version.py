"""Which version of DeepSpeed dsrun stands for. Reads one variable; writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import InputError

#: Newest DeepSpeed with a face that dsrun's is complete for. The folder of metadata in `site` is named after it.
STANDARD = "0.19.8"
#: Oldest one whose face clients may be told of: transformers and accelerate refuse older ones.
_OLDEST = (0, 9, 3)
#: The user's own word, for scripts that refuse a version as too new.
WISH_ENV = "DSRUN_AS_DEEPSPEED_VERSION"


def wanted_version(environ: Mapping[str, str]) -> str:
    """Returns the version that a job's `deepspeed` says it is, without dsrun's own ending.

    The user's wish, else what the launcher or a parent has set, whose wish may not have come along, else the standard.

    Args:
        environ: variables of the job.

    Raises:
        InputError: the user asks for something else than a version that dsrun can stand for.
    """
    name = next((name for name in (WISH_ENV, AS_DEEPSPEED_ENV) if environ.get(name)), None)
    if name is None:
        return STANDARD
    wish = environ[name]
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", wish, re.ASCII)
    if found is None or not _OLDEST <= tuple(map(int, found.groups())) <= _numbers(STANDARD):
        oldest = ".".join(map(str, _OLDEST))
        raise InputError(
            f"environment: {name} is {wish[:200]!r}; expected a version of DeepSpeed from {oldest} to {STANDARD}",
            hint=f"unset it: dsrun then stands for {STANDARD}",
        )
    return wish


def full_version(version: str) -> str:
    """Returns what `deepspeed.__version__` is: the standard one names dsrun, a wish is taken as it is.

    A version with a local part counts as newer than the same without, and a wish is there to pass for old enough.

    Args:
        version: version as `wanted_version` returns it.
    """
    return f"{version}+dsrun" if version == STANDARD else version


def present_version() -> str:
    """Returns the version that this process's `deepspeed` stands for; the standard one where it stands for none.

    Raises:
        InputError: `DSRUN_AS_DEEPSPEED` is no version that dsrun can stand for.
    """
    return wanted_version({AS_DEEPSPEED_ENV: os.environ.get(AS_DEEPSPEED_ENV, "")})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
