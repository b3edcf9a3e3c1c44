"""What a copy to the host reads: the tensor itself, or a clone where the script may change the tensor meanwhile.

Knows nothing of where the copy goes. Used by the rings that copy beside the computation.

[Note: tensors that change while they are copied]
A keeper keeps the values of the moment of `put`. On a bus that is not instant the copy reads them later, and an
in-place operation that the script enqueues in between (`x += y`, `relu_`) overwrites what is still to be read. From the
moment when the compute stream waits for the copy nothing can go wrong any more; up to then the tensor is *leaving*.

So a tensor is copied through a clone, which is made on the compute stream, until tensors of its *kind* are known to
stay what they are while they leave. A kind is the label of the block and the form of the tensor. What is learned about
a kind counts from the next *round* on, that is, once everything that was put has been let go. So the same puts are
cloned in every run of a script, whatever the copies' timing, and calls that share a label do not judge each other
in the middle of a forward. A tensor of another shape is of another kind, for a script may branch on it.

- Not known: a clone is copied, and the version of the tensor is watched, without its memory.
- Stays: the tensor itself is copied. Should it change after all before its copy is known to be done, its ticket
  raises an error: torn values are given to nobody.
- Changes: a clone is copied from then on.

The version is torch's count of in-place operations. What goes past it (`tensor.data`, a kernel of the script's own that
writes to its argument) is not seen here, and not by autograd either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...memory.bus import Event
from .flat import Form

#: Kinds that are remembered. Of more, the first is forgotten, which costs the next tensor of that kind a clone.
_MOST_KINDS = 1 << 14

_Kind = tuple[str, Form]


class CopySources:
    """Decides for each tensor of a ring what its copy reads; see [Note: tensors that change while they are copied].

    Args:
        instant: copies are done when they have started.
    """

    def __init__(self, *, instant: bool) -> None:
        self._instant = instant
        self._stays: dict[_Kind, bool] = {}
        self._new: set[_Kind] = set()

    def begin_round(self) -> None:
        """Nothing that was put is out any more: what has been learned counts from here on."""
        for kind in self._new:
            self._stays.setdefault(kind, True)
        self._new.clear()
        while len(self._stays) > _MOST_KINDS:
            del self._stays[next(iter(self._stays))]

    def source_of(self, tensor: Tensor, line_N: Tensor, form: Form, *, label: str) -> CopySource:
        """Returns what the copy of a tensor is to read.

        Args:
            tensor: tensor as the script has it.
            line_N: its elements, shape [N], as `as_line` returned them.
            form: form of the tensor (shape, strides, dtype), as `as_line` returned it.
            label: the block that wants it again.
        """
        is_own = line_N.data_ptr() != tensor.data_ptr()  # a tensor with gaps has been copied into its line
        if self._instant or is_own:
            return CopySource(line_N, line_N, form, label, sources=self, is_own=is_own, is_safe=True)
        kind = (label, form)
        if self._stays.get(kind, False):
            return CopySource(line_N, line_N, form, label, sources=self, is_own=False, is_safe=False)
        if kind not in self._stays:
            self._new.add(kind)
        return CopySource(line_N.clone(), _without_memory(line_N), form, label, sources=self, is_own=True, is_safe=True)

    def changes(self, label: str, form: Form) -> None:
        """A tensor of this kind has changed while it was leaving."""
        self._stays[label, form] = False


class CopySource:
    """What the copy of one tensor reads, held while the tensor is leaving.

    Attributes:
        line_N: flat tensor that the copy reads, shape [N]; None once the tensor has left the device.
        is_own: whether no script has `line_N`, as passed to the constructor.

    Args:
        line_N: flat tensor that the copy reads, shape [N].
        watched: tensor that has the version of the script's tensor, to detect in-place changes.
        form: form of the tensor: shape, strides and dtype.
        label: the block that wants it again.
        sources: object that is told when a tensor changed while it was leaving.
        is_own: no script has `line_N`.
        is_safe: whether changes of the script's tensor cannot reach the copy.
    """

    __slots__ = (
        "_form",
        "_is_safe",
        "_is_torn",
        "_label",
        "_line_version",
        "_sources",
        "_version",
        "_watched",
        "is_own",
        "line_N",
    )

    def __init__(
        self,
        line_N: Tensor,
        watched: Tensor,
        form: Form,
        label: str,
        *,
        sources: CopySources,
        is_own: bool,
        is_safe: bool,
    ) -> None:
        self.line_N: Tensor | None = line_N
        self._line_version = line_N._version
        self._watched: Tensor | None = watched
        self._version = watched._version
        self._form = form
        self._label = label
        self._sources = sources
        self.is_own = is_own
        self._is_safe = is_safe
        self._is_torn = False

    def still_here(self) -> Tensor | None:
        """Returns the line while it is on the device with the values that were put.

        Whoever takes one that is `is_own` may write to it as to any tensor of theirs, so the copy must have read it.
        """
        return self.line_N if self.line_N is not None and self.line_N._version == self._line_version else None

    def look(self, event: Event) -> None:
        """Notes whether the copy ended before any change.

        Args:
            event: the end of the copy, or of one after it.
        """
        # The event first: what is unchanged after that was unchanged when the copy was done.
        self._is_safe = self._is_safe or (event.query() and not self._has_changed())

    def end(self, event: Event) -> None:
        """The tensor has left: what changes it from now on runs after the copy.

        Args:
            event: event at the end of the copy, or of one after it; see `look`.
        """
        self.look(event)
        if self._has_changed():
            self._sources.changes(self._label, self._form)
            self._is_torn = not self._is_safe
        self.line_N = self._watched = None

    def check(self) -> None:
        """Returns if the copy has the values that were put.

        Raises:
            ModelError: the tensor was changed in place while it was read.
        """
        if not self._is_torn and (self._is_safe or not self._has_changed()):
            return
        raise ModelError(
            f"activation checkpointing: a tensor of shape {self._form.shape} that `{self._label}` needs again was "
            "changed in place while it was copied to host memory, which none of its kind was in earlier steps",
            hint="write `x = x + y` in place of `x += y`, or leave this block out by `activation_checkpointing.blocks`",
        )

    def _has_changed(self) -> bool:
        return self._watched is not None and self._watched._version != self._version


def _without_memory(line_N: Tensor) -> Tensor:
    """Returns a tensor that has the version of `line_N`, now and later, and keeps no memory."""
    watched = line_N.detach()
    watched.data = torch.empty(0, dtype=line_N.dtype, device=line_N.device)
    return watched
