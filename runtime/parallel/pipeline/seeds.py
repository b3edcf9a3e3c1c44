"""Random numbers of dropout that do not depend on how a model is cut, nor on the order of its micro batches.

Seeds torch's generators where layers begin and end. Knows no schedule: whoever runs a chunk says which update and micro
batch it runs. Python's own and numpy's generators are left alone.

[Note: seeds of layers]
What a layer draws comes from a seed that is hashed from the run's seed, the update, the micro batch, the data
coordinate and the layer's number in the whole model. It is set before the layer's forward, so neither the layers before
it nor other micro batches matter. Behind the layer another one is set, for what the model itself draws between layers.
A recomputation calls the layer again and so draws the same, if it runs in `LayerSeeds.running` of the same micro batch:
backwards are run in it as well as forwards. Outside of it the layers draw from wherever the generators are.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...generators import generators_of
from ...own_hooks import OwnHook

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Number of the place before the first layer; layer n has 2n + 1 inside and 2n + 2 behind it.
_BEFORE = 0


class LayerSeeds:
    """Sets the generators where layers begin and end, see [Note: seeds of layers].

    Args:
        pieces: number in the whole model, from 0 on, of each layer on this rank: blocks, what stands outside of them,
            and the places of absent blocks. None of them is inside of another.
        seed: seed of the run; the same on all ranks.
        data_rank: this rank's coordinate along the data axis, so that replicas draw other numbers.
        device: device that the layers compute on; its generator is set beside the CPU's.
    """

    def __init__(
        self, pieces: Mapping[nn.Module, int], seed: int, *, data_rank: int, device: torch.device | None = None
    ) -> None:
        self._start = _mix(_mix(seed & _MASK, data_rank), 0)
        self._generators = generators_of(device)
        self._base = self._start
        self._is_running = False
        self._handles: list[RemovableHandle] = []
        for layer, number in pieces.items():
            inside, behind = OwnHook(partial(self._set, 2 * number + 1)), OwnHook(partial(self._set, 2 * number + 2))
            self._handles.append(layer.register_forward_pre_hook(inside))
            self._handles.append(layer.register_forward_hook(behind))

    def at(self, update: int, micro: int) -> None:
        """Says which micro batch of which update runs from here on, inside of `running`."""
        self._base = _mix(_mix(self._start, update), micro)

    @contextmanager
    def running(self, update: int, micro: int) -> Generator[None]:
        """Inside, layers draw what is theirs in this micro batch; outside, nothing has been drawn.

        Args:
            update: number of the update that the micro batch is for.
            micro: number of the micro batch.
        """
        was_running, base_before = self._is_running, self._base
        states = [generator.get_state() for generator in self._generators]
        self.at(update, micro)
        self._is_running = True
        self._set(_BEFORE)
        try:
            yield
        finally:
            self._is_running, self._base = was_running, base_before
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def remove(self) -> None:
        """Takes the hooks off the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _set(self, place: int, *_: Any) -> None:
        if self._is_running:
            seed = _mix(self._base, place)
            for generator in self._generators:
                generator.manual_seed(seed)


def _mix(state: int, value: int) -> int:
    """Returns 64 bits of both, as SplitMix64 (Steele, Lea, Flood, 2014) finishes its numbers."""
    z = (state ^ (value & _MASK)) + _GOLDEN & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
