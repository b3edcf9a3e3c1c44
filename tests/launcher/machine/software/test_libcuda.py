from __future__ import annotations

import platform
import struct
from pathlib import Path

import pytest

from dsrun.launcher.machine.software.libcuda import cached_path, libcuda_version

FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}.get(platform.machine(), 0x0003)


def library(root: Path, folder: str, version: str | None) -> None:
    """Puts libcuda.so.1 into a folder, as drivers and CUDA's packages do: a link to a file with the version."""
    place = root / folder.lstrip("/")
    place.mkdir(parents=True)
    name = "libcuda.so.1.1" if version is None else f"libcuda.so.{version}"
    (place / name).touch()
    (place / "libcuda.so.1").symlink_to(name)


def cache(*entries: tuple[int, str, str], old: bytes = b"") -> bytes:
    """The loader's cache: flags, name and path of each library."""
    head = 48 + 24 * len(entries)
    words, table = b"", b""
    for flags, name, path in entries:
        places = [head + len(words), head + len(words) + len(name) + 1]
        words += name.encode() + b"\0" + path.encode() + b"\0"
        table += struct.pack("<iIIIQ", flags, *places, 0, 0)
    return old + b"glibc-ld.so.cache1.1" + struct.pack("<II20x", len(entries), len(words)) + table + words


def test_the_drivers_own_library_has_its_version(tmp_path: Path) -> None:
    library(tmp_path, f"/usr/lib/{platform.machine()}-linux-gnu", "550.90.07")
    assert libcuda_version(tmp_path, {}) == "550.90.07"


def test_a_folder_of_the_search_path_goes_first(tmp_path: Path) -> None:
    library(tmp_path, "/usr/lib64", "535.216.03")
    library(tmp_path, "/usr/local/cuda/compat/lib.real", "580.65.06")
    (tmp_path / "usr/local/cuda/compat/lib").symlink_to("lib.real")
    environ = {"LD_LIBRARY_PATH": "/nowhere::lib:/usr/local/cuda/compat/lib:/usr/lib64"}
    assert libcuda_version(tmp_path, environ) == "580.65.06"
    assert libcuda_version(tmp_path, {}) == "535.216.03"


def test_the_loaders_cache_goes_before_its_folders(tmp_path: Path) -> None:
    library(tmp_path, "/usr/lib64", "535.216.03")
    library(tmp_path, "/usr/local/cuda-13.0/compat", "580.65.06")
    (tmp_path / "etc").mkdir()
    found = cache((FLAGS, "libcudart.so.13", "/x"), (FLAGS, "libcuda.so.1", "/usr/local/cuda-13.0/compat/libcuda.so.1"))
    (tmp_path / "etc/ld.so.cache").write_bytes(found)
    assert libcuda_version(tmp_path, {}) == "580.65.06"


@pytest.mark.parametrize("old", [b"", b"ld.so-1.7.0\0" + b"\0" * 52])
def test_the_cache_tells_a_library_of_this_architecture(old: bytes) -> None:
    found = cache(
        (0x0003, "libcuda.so.1", "/lib32/libcuda.so.1"), (0x0303, "libcuda.so.1", "/lib64/libcuda.so.1"), old=old
    )
    assert cached_path(found, "libcuda.so.1", machine="x86_64") == "/lib64/libcuda.so.1"
    assert cached_path(found, "libcuda.so.1", machine="aarch64") is None
    assert cached_path(found, "libnccl.so.2", machine="x86_64") is None


@pytest.mark.parametrize("text", [b"", b"nonsense", cache((0x0303, "libcuda.so.1", "/x"))[:60]])
def test_a_cache_that_cannot_be_read_says_nothing(text: bytes) -> None:
    assert cached_path(text, "libcuda.so.1", machine="x86_64") is None


def test_a_library_without_a_version_in_its_name_says_nothing(tmp_path: Path) -> None:
    """WSL's and Jetson's."""
    assert libcuda_version(tmp_path, {}) is None
    library(tmp_path, "/usr/lib64", None)
    assert libcuda_version(tmp_path, {}) is None
