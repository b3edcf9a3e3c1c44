"""Talks to the NVIDIA driver through NVML: opens it, asks one question at a time. Knows no GPU and no field.

A question that the driver, the GPU or an old `pynvml` cannot answer is None and never an exception: a report lacks a
value then, not the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")
#: What people search for; `pynvml` says "RM has detected an NVML/RM version mismatch."
_KNOWN_WORDS = {"LibRmVersionMismatch": "Driver/library version mismatch"}


class NoDriver(Exception):
    """The driver does not answer; the text says why.

    Attributes:
        error: end of the name that the NVML error has in `pynvml` (`LibRmVersionMismatch`); empty where the package is
            not installed.
        words: the driver's own for it.
    """

    def __init__(self, text: str, *, error: str, words: str = "") -> None:
        super().__init__(text)
        self.error = error
        self.words = words


@contextlib.contextmanager
def open_nvml(load_nvml: Callable[[], Any] | None = None) -> Generator[Any, None, None]:
    """Gives the `pynvml` module, ready to be asked, and shuts it down at the end.

    Args:
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one.

    Raises:
        NoDriver: there is none, or it failed at a question inside.
    """
    try:
        nvml = (load_nvml or _load_pynvml)()
    except ImportError:
        raise NoDriver("the package nvidia-ml-py is not installed", error="") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _no_driver(error) from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _no_driver(error) from error
    finally:
        ask_driver(nvml, nvml.nvmlShutdown)


@contextlib.contextmanager
def nvml_kept_open(load_nvml: Callable[[], Any] | None = None) -> Generator[None, None, None]:
    """Keeps the driver open over several questions, each of which opens it; nothing where it does not answer.

    Args:
        load_nvml: function that returns the `pynvml` module, a made-up one in tests; None imports the real one. See
            `open_nvml`.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(NoDriver):
            stack.enter_context(open_nvml(load_nvml))
        yield


def ask_driver(nvml: Any, call: Callable[..., _T], *args: Any) -> _T | None:
    """One question to the driver; None where it has no answer (old driver, MIG, virtual GPU)."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def ask(nvml: Any, name: str, *args: Any) -> Any:
    """One question by its name (`nvmlDeviceGetTemperature`); None too where this `pynvml` does not know it."""
    call = getattr(nvml, name, None)
    return None if call is None else ask_driver(nvml, call, *args)


def error_name(error: Exception) -> str:
    """Returns the end of an NVML error's name in `pynvml`: `GpuIsLost`."""
    return type(error).__name__.removeprefix("NVMLError_")


def error_words(error: Exception) -> str:
    """Returns what an NVML error says, in the words of `nvidia-smi` where `pynvml` has others; without a full stop."""
    return _KNOWN_WORDS.get(error_name(error)) or str(error).rstrip(".")


def text_of(value: Any) -> str | None:
    """Returns a text of the driver, which older versions give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _load_pynvml() -> Any:
    import pynvml

    return pynvml


def _no_driver(error: Exception) -> NoDriver:
    name, words = error_name(error), error_words(error)
    if name in ("LibraryNotFound", "DriverNotLoaded"):
        return NoDriver("no NVIDIA driver", error=name, words=words)
    return NoDriver(f"the NVIDIA driver does not answer: {words}", error=name, words=words)
