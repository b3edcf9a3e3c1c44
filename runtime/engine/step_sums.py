"""Numbers that the ranks add up once a step, in the all-reduce that the gradient norm needs anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Name = Literal[
    "losses", "stop_request", "tokens_padded", "tokens", "tokens_in_loss", "labels", "model_flops", "hardware_flops"
]


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over all ranks of one step.

    Attributes:
        losses: Sum of the losses of all micro batches.
        stop_request: Sum of the requests to stop, see `stop_signals`; 0 where no rank was asked to.
        tokens_padded: Number of tokens with padding; 0 where a model takes none.
        tokens: Number of tokens without padding that an attention mask tells.
        tokens_in_loss: Number of labels that count.
        labels: Number of all labels; 0 where they are not seen.
        model_flops: Operations of forwards and backwards, each once; 0 where they are not counted.
        hardware_flops: Operations with those that were computed again.
    """

    losses: float
    stop_request: float = 0.0
    tokens_padded: float = 0.0
    tokens: float = 0.0
    tokens_in_loss: float = 0.0
    labels: float = 0.0
    model_flops: float = 0.0
    hardware_flops: float = 0.0


_NAMES: tuple[str, ...] = tuple(each.name for each in fields(StepSums))
#: Numbers of a rank.
NUMBERS = len(_NAMES)


class RankNumbers:
    """This rank's part of the sums of a step.

    Numbers of the host are added up there, and go to the device once a step; those of a device are added up on it, so
    that the host need not read what the device computes.

    Args:
        device: Device that the ranks' sums are made on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = dict.fromkeys(_NAMES, 0.0)
        #: None on a CPU, which is the host.
        self._on_device_N = None if device.type == "cpu" else torch.zeros(NUMBERS, dtype=torch.float64, device=device)

    def add(self, name: Name, value: Tensor | float) -> None:
        """Adds to a number; a tensor has one element, on any device."""
        if not isinstance(value, Tensor):
            self._on_host[name] += value
        elif self._on_device_N is None:
            self._on_host[name] += value.item()
        else:
            index = _NAMES.index(name)
            self._on_device_N[index : index + 1].add_(value.detach().reshape(1).to(self._device))

    def put(self, name: Name, value: float) -> None:
        """Replaces a number of the host."""
        self._on_host[name] = value

    def values_N(self) -> Tensor:
        """Returns the numbers: fp64, [NUMBERS]; what is added later counts in the next step, after `clear`."""
        if self._on_device_N is None:
            return torch.tensor(list(self._on_host.values()), dtype=torch.float64)
        for index, (name, value) in enumerate(self._on_host.items()):
            if value:
                # By the value and not copied from the host: a copy would wait for all that the device has to do.
                self._on_device_N[index].add_(value)
                self._on_host[name] = 0.0
        return self._on_device_N

    def forget(self) -> None:
        """Begins anew, but for a request to stop."""
        request = self._on_host["stop_request"]
        self.clear()
        self._on_host["stop_request"] = request

    def clear(self) -> None:
        """Begins a new step."""
        self._on_host = dict.fromkeys(_NAMES, 0.0)
        if self._on_device_N is not None:
            self._on_device_N.zero_()


def read_sums(values: Sequence[float]) -> StepSums:
    """Returns sums by name; the first numbers of what `RankNumbers` of all ranks add up to."""
    return StepSums(*values[:NUMBERS])
