"""Whether ranks that share each layer did the same between two updates: inputs, random numbers, losses.

The first forward's inputs are looked at by name (`same_inputs.py`). Later ones, labels that never reach the model, and
random numbers that one rank drew alone would part the ranks as silently. So each rank sums up what it did, and the
ranks tell each other with the all-reduce that an update has anyway.

[Note: sums that are nothing]
Of `size` ranks that share layers the first one adds its number `size - 1` times, and each other takes its own away
once: over the ranks that is 0 where all have the same. The numbers of all replicas share one sum, so each is a whole
number of 24 bits, whose sums are exact in fp64, and mixed with the replica's own, so that they do not cancel. Losses
are compared as they are: kernels may add up in another order on each rank, so a difference counts from 1e-5 of a
replica's losses on, and from 1e-6 where these are near 0.

[Note: what is left out]
Forwards without gradients: their inputs may be what ranks keep of their own heads (caches of keys). So may tensors that
the model itself has given, where they are given back to it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from dsrun.errors import ModelError

from ...generators import capture_host, generators_of
from ...mesh.agree.texts import gather_texts
from ...mesh.collectives import Collectives
from ...own_hooks import OwnHook
from .same_inputs import HINT, inputs_in

#: Largest difference of the ranks' losses, by their size, and at least.
TOLERANCE, LEAST = 1e-5, 1e-6
_LABEL = "what ranks that share layers did"
#: Elements of an input that count at the most, spread over it.
_MOST = 1 << 16
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_MASK = (1 << 24) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class StepWatch:
    """What this rank did since the last update, for comparison with those that share its layers.

    Args:
        ranks: numbers in the job of the ranks that share each layer, this one among them; one where none does.
        rank: this rank's position among them.
        device: device that the model computes on.
        draws: whether random numbers count; stages of a pipeline set the seeds of all layers themselves.
    """

    def __init__(self, ranks: Sequence[int], rank: int, device: torch.device, *, draws: bool = True) -> None:
        self._ranks, self._device = tuple(ranks), device
        self._mixed = _digest(ranks[0]) | 1
        #: What the last forward has given, by id: a set of tensors would compare their elements.
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._generators = generators_of(device) if draws else []
        self._factor = float(len(ranks) - 1 if rank == 0 else -1)
        self._weights: Tensor | None = None
        self._inputs = torch.zeros((), dtype=torch.int64, device=device)
        self._shapes = 0
        self._drawn = 0
        self._before: list[int] = []
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._size = torch.zeros((), dtype=torch.float64, device=device)

    def follow(self, model: nn.Module) -> None:
        """Looks at each forward of a model from now on; enters no collective, and waits for no device."""
        model.register_forward_pre_hook(OwnHook(self._enter), with_kwargs=True, prepend=True)
        model.register_forward_hook(OwnHook(self._leave))

    def add_loss(self, loss: Tensor) -> None:
        """Takes one micro batch's loss, detached, with one element, on any device."""
        loss = loss.to(self._device).reshape(())
        self._loss += loss
        # A unit in the last place of bf16 is more than the tolerance.
        self._size += loss.abs() * max(1.0, torch.finfo(loss.dtype).eps / TOLERANCE)

    def forget(self) -> None:
        """A global batch is given up, or an update was taken: begins anew."""
        self._inputs.zero_()
        self._loss.zero_()
        self._size.zero_()
        self._shapes = self._drawn = 0

    def shared_3(self) -> Tensor:
        """Returns what is summed over all ranks of the job, fp64, [3], see [Note: sums that are nothing]."""
        host = _digest(self._shapes, self._drawn) & _MASK
        mark = ((((self._inputs >> 20) & _MASK) ^ host) * (self._mixed & _MASK)) & _MASK
        return torch.stack([mark.double() * self._factor, self._loss * self._factor, self._size])

    def refuse_differences(self, sums_3: Sequence[float], world: Collectives, *, at: str) -> None:
        """Raises on every rank where some that share layers did not do the same; then gathers what each did.

        Args:
            sums_3: sums of `shared_3` over all ranks.
            world: all ranks of the job.
            at: text that names the step.

        Raises:
            ModelError: naming the ranks, and what differs.
        """
        marks, losses, size = sums_3
        if marks == 0 and not abs(losses) > max(TOLERANCE * size / world.size, LEAST):
            return
        mine = {
            "first": self._ranks[0],
            "inputs": [int(self._inputs.item()), self._shapes],
            "random numbers": self._drawn,
            "loss": self._loss.item(),
            "size": self._size.item(),
        }
        texts = gather_texts(json.dumps(mine), world, device=self._device, label=_LABEL)
        everyone = dict(enumerate(json.loads(text) for text in texts))
        found = [text for text in (_differing(replica) for replica in _replicas(everyone)) if text]
        said = "; ".join(found) or f"sums over all ranks are {marks:g} and {losses:g}, and not 0"
        raise ModelError(f"model: ranks that share each layer did not do the same{at}: {said}", hint=_HINT)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = []
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            for name, value in inputs_in({"arguments": args, **kwargs}):
                if not isinstance(value, Tensor):
                    self._shapes = _digest(self._shapes, name, value)
                elif not self._was_given(value):
                    self._shapes = _digest(self._shapes, name, str(value.dtype), tuple(value.shape))
                    self._add(value)
        self._before = self._states()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        for now, before in zip(self._states() if self._before else [], self._before, strict=True):
            if now != before:  # what nobody draws may differ
                self._drawn = _digest(self._drawn, before)
        self._given = {id(value): weakref.ref(value) for _, value in inputs_in(output) if isinstance(value, Tensor)}

    def _states(self) -> list[int]:
        """Returns a digest of the state of each generator that a forward may draw from: torch's, Python's, numpy's."""
        if not self._generators:
            return []
        host = capture_host()
        return [
            *(xxh3_64_intdigest(generator.get_state().numpy().data) for generator in self._generators),
            hash(host.python[1]),
            0 if host.numpy is None else _digest(host.numpy["state"]["pos"], host.numpy["state"]["key"].tobytes()),
        ]

    def _was_given(self, tensor: Tensor) -> bool:
        given = self._given.get(id(tensor))
        return given is not None and given() is tensor

    def _add(self, tensor: Tensor) -> None:
        """Adds values of an input to the digest, where they lie."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            return
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        flat = values.reshape(-1)
        flat = flat[:: -(-flat.numel() // _MOST) or 1].contiguous()
        # Of 8 bytes as two numbers of 4: round ones differ in their highest bits alone, which a product loses.
        integers = flat.view(_INTEGERS[min(flat.element_size(), 4)]).to(self._device)
        if self._weights is None:
            self._weights = torch.arange(2 * _MOST, device=self._device) * _ODD | 1
        self._inputs.mul_(_ODD).add_(((integers + 1) * self._weights[: integers.numel()]).sum())


_HINT = (
    f"inputs: {HINT}; random numbers: seed by engine.get_data_parallel_rank() and draw alike on all ranks; losses: "
    "make labels of the same samples; where none of these differ, a plan is wrong where no block is compared. "
    '`"check": false` in `tensor_parallel` compares nothing'
)


def _digest(*values: object) -> int:
    return xxh3_64_intdigest(repr(values).encode())


def _replicas(everyone: Mapping[int, Mapping[str, Any]]) -> list[dict[int, Mapping[str, Any]]]:
    """Returns what ranks did, by replica."""
    found: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, did in everyone.items():
        found.setdefault(did["first"], {})[rank] = did
    return list(found.values())


def _differing(replica: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what differs among ranks that share layers; empty where nothing does."""
    first, *others = replica
    said: list[str] = []
    for key in ("inputs", "random numbers"):
        odd = [str(rank) for rank in others if replica[rank][key] != replica[first][key]]
        if odd:
            said.append(f"other {key} on rank {', '.join(odd)}")
    losses = [did["loss"] for did in replica.values()]
    if max(losses) - min(losses) > max(TOLERANCE * max(did["size"] for did in replica.values()), LEAST) / len(losses):
        said.append("losses " + ", ".join(f"{loss:.7g}" for loss in losses))
    return f"ranks {', '.join(map(str, replica))}: {' and '.join(said)}" if said else ""
