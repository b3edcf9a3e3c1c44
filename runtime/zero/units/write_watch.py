"""Which parameters of a unit were written to since the last look, by anybody but the engine. Takes nothing over.

[Note: how writes are seen]
torch counts the changes in place of a tensor and of all its views: of the parameter, of what `detach` returns, of a
state dict. What `data` returns has a count of its own, so that alias is kept, and its count is looked at too. The
engine's own updates go through the units' flat buffers, which count for themselves. So a look costs a comparison of a
number or two a parameter, and reads no memory. Not counted is what goes past torch: memory shared with NumPy, and
kernels that are given an address.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...compat import without_overrides
from ..partition_parameters import memory_of


class WriteWatch:
    """See [Note: how writes are seen].

    Args:
        params: the parameters, by their position.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._handed: dict[int, tuple[Tensor, int]] = {}
        self._versions: list[int] = []
        self.skip()

    def hand_out(self, position: int, memory: Tensor) -> Tensor:
        """Returns an alias of a parameter's memory whose changes are seen.

        Args:
            position: position of the parameter in the unit.
            memory: memory that the parameter has now.
        """
        kept = self._handed.get(position)
        if kept is None or kept[0].data_ptr() != memory.data_ptr() or kept[0].shape != memory.shape:
            kept = self._handed[position] = (memory, memory._version)
        return kept[0].detach()

    @property
    def has_handed_out(self) -> bool:
        """Whether a script may hold an alias."""
        return bool(self._handed)

    def take(self) -> list[int]:
        """Returns the positions of the parameters that were written to since the last look, in order."""
        with without_overrides():
            versions = [param._version for param in self._params]
        if versions == self._versions and not self._handed:
            return []
        written = {n for n, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then}
        self._versions = versions
        for position, (alias, then) in self._handed.items():
            now = alias._version
            if now != then:
                self._handed[position] = (alias, now)
                if alias.data_ptr() == memory_of(self._params[position]).data_ptr():
                    written.add(position)
        return sorted(written)

    def has_changed(self, position: int, *, since: int) -> bool:
        """Whether one parameter was written to where its memory is now; does not count as a look.

        Args:
            position: position of the parameter.
            since: torch's count of its changes at the time from which writes count.
        """
        param = self._params[position]
        if version_of(param) != since:
            return True
        alias, then = self._handed.get(position, (param, since))
        return version_of(alias) != then and alias.data_ptr() == memory_of(param).data_ptr()

    def mark(self, position: int) -> None:
        """A parameter was given other memory, which counts as written."""
        self._versions[position] = -1

    def skip_one(self, position: int) -> None:
        """What has been written to one parameter so far is known."""
        self._versions[position] = version_of(self._params[position])
        if position in self._handed:
            alias, _ = self._handed[position]
            self._handed[position] = (alias, alias._version)

    def skip(self) -> None:
        """What has been written so far is known, or the engine's own."""
        with without_overrides():
            self._versions = [param._version for param in self._params]
        self._handed = {position: (alias, alias._version) for position, (alias, _) in self._handed.items()}


def version_of(param: Tensor) -> int:
    """Returns torch's count of changes in place of a parameter, whatever its class."""
    with without_overrides():
        return param._version
