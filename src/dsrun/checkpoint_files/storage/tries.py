"""Asking an object store: some times where it may be well again soon, once where it will not; then an error for people.

Knows no operation of a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .places import Address, StorageError

T = TypeVar("T")

#: Package that a scheme needs, by the extra of dsrun that brings it.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: What the libraries beneath raise where nobody has said who is asking; they are no OSErrors.
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError", "NoAuthTokenError"}
)
#: What asking again does not change.
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, ImportError)
_PROGRAMMING = (TypeError, ValueError, AttributeError, NotImplementedError, AssertionError)


class ShortReadError(Exception):
    """A store has sent fewer bytes than were asked for and are there."""


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a store is asked, beyond what its library does by itself.

    Attributes:
        most: largest number of attempts, the first one included.
        first_wait_s: seconds to wait before the second attempt; doubled before each further one.
        wait: function that waits for a number of seconds.
    """

    most: int = 4
    first_wait_s: float = 0.5
    wait: Callable[[float], None] = time.sleep

    def do(self, what: str, place: Address, work: Callable[[], T]) -> T:
        """Returns what `work` returns.

        Args:
            what: participle that completes "cannot be" in messages, e.g. `read`.
            place: address in the store, for messages.
            work: function that sends the request to the store; it may run several times.

        Raises:
            FileNotFoundError: there is nothing at the place.
            StorageError: the store does not do it.
        """
        for number in range(1, self.most + 1):
            try:
                return work()
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{place}: there is nothing: {error}") from error
            except Exception as error:
                if number == self.most or not may_pass(error):
                    raise _told(what, place, error, number) from error
            self.wait(self.first_wait_s * 2 ** (number - 1))
        raise AssertionError("the last time returns or raises")


def may_pass(error: Exception) -> bool:
    """Whether a store that has raised this may do it when it is asked again."""
    return not isinstance(error, (*_FINAL, *_PROGRAMMING)) and type(error).__name__ not in _NO_CREDENTIALS


def missing_package(scheme: str, error: ImportError) -> StorageError:
    """Returns the error about a package that is not installed."""
    extra = _EXTRAS.get(scheme)
    hint = f"pip install 'dsrun[{extra}]'" if extra else "install the package that it names"
    return StorageError(
        f"{scheme}://: what is needed for it cannot be imported: {error}", hint=f"{hint}, on every host"
    )


def _told(what: str, place: Address, error: Exception, number: int) -> StorageError:
    if isinstance(error, ImportError):
        return missing_package(place.scheme, error)
    cause = str(error) or type(error).__name__
    text = f"{place}: cannot be {what}: {cause}"
    if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
        return StorageError(
            text, hint="credentials come from the environment of every host, as the store's own tools find them"
        )
    if not may_pass(error):
        return StorageError(text, hint="see whether the address is right")
    times = f" (asked {number} times)" if number > 1 else ""
    return StorageError(f"{text}{times}", hint="see whether the store can be reached from this host, and try again")
