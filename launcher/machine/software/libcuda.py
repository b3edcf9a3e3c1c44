"""Which libcuda.so.1 the loader gives a program, and so which version of CUDA's driver library it runs on. Loads none.

It is the driver's own as a rule. Containers with CUDA's compatibility package put that of a newer driver before it, by
LD_LIBRARY_PATH or the loader's cache; cuda_fit says what comes of it.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

_NAME = "libcuda.so.1"
#: The file behind the name has its version: `libcuda.so.580.65.06`. Those of WSL and Jetson have none.
_VERSIONED = re.compile(r"libcuda\.so\.([0-9]{3,}(?:\.[0-9]+)+)")
#: Of glibc: a header, then entries of flags, places of name and path, OS version and hardware capabilities.
#: Source: glibc, elf/cache.c and sysdeps/generic/dl-cache.h.
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER_BYTES = 48
_ENTRY = struct.Struct("<iIIIQ")
#: Flags that mark libraries for 64 bits of x86 and Arm; those for 32 bits have other ones.
_ARCHITECTURES = {"x86_64": 0x0300, "aarch64": 0x0A00}
_DEFAULT_FOLDERS = (
    *("/lib/{machine}-linux-gnu", "/usr/lib/{machine}-linux-gnu"),
    *("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
)


def libcuda_version(root: Path, environ: Mapping[str, str]) -> str | None:
    """Returns the version of the libcuda.so.1 that a program would load; None without one, or where it does not say.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables of the program, of which LD_LIBRARY_PATH is read.
    """
    found = library_path(root, environ, _NAME)
    if found is None:
        return None
    version = _VERSIONED.fullmatch(os.path.basename(os.path.realpath(root / found.lstrip("/"))))
    return None if version is None else version.group(1)


def library_path(root: Path, environ: Mapping[str, str], name: str) -> str | None:
    """Returns the path of the library that a program would load by a name; None without one.

    Args:
        root: `/`, or a made-up tree.
        environ: environment variables of the program, of which LD_LIBRARY_PATH is read.
        name: file name of the library.
    """
    paths = _candidates(root, environ, name)
    return next((path for path in paths if (root / path.lstrip("/")).exists()), None)


def cached_path(cache: bytes, name: str, *, machine: str) -> str | None:
    """Finds where a library is by the loader's cache.

    Args:
        cache: the contents of /etc/ld.so.cache.
        name: file name of the library, `libcuda.so.1`.
        machine: machine type as `uname -m` says it; types other than x86_64 and aarch64 take every entry.
    """
    start = cache.find(_MAGIC)
    if start < 0:
        return None
    try:
        (count,) = struct.unpack_from("<I", cache, start + len(_MAGIC))
        for number in range(count):
            flags, key, value, _, _ = _ENTRY.unpack_from(cache, start + _HEADER_BYTES + number * _ENTRY.size)
            if flags & 0xFF00 == _ARCHITECTURES.get(machine, flags & 0xFF00) and _text(cache, start + key) == name:
                return _text(cache, start + value)
    except (struct.error, ValueError):
        # Cut short, or of another byte order: the default folders are left.
        return None
    return None


def _candidates(root: Path, environ: Mapping[str, str], name: str) -> Iterator[str]:
    """Yields the paths in the order in which the loader tries them."""
    for folder in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder.startswith("/"):
            yield f"{folder}/{name}"
    machine = platform.machine()
    try:
        cached = cached_path((root / "etc/ld.so.cache").read_bytes(), name, machine=machine)
    except OSError:
        cached = None
    if cached is not None:
        yield cached
    for folder in _DEFAULT_FOLDERS:
        yield f"{folder.format(machine=machine)}/{name}"


def _text(cache: bytes, place: int) -> str:
    return os.fsdecode(cache[place : cache.index(b"\0", place)])
