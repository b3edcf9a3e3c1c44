"""Which dtype a tensor has, where. No casting happens here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Dtypes by their names in a config.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtypes of one engine.

    Attributes:
        compute: parameters in forward and backward, and so gradients as autograd makes them and the wire carries them.
        master: parameters as the optimizer's updates leave them.
        sums: gradients, reduced over ranks and added up over micro batches.
        states: optimizer states, and what the optimizer computes an update in.
        buffers: the module's buffers; None: as parameters in forward.
    """

    compute: torch.dtype
    master: torch.dtype = torch.float32
    sums: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    buffers: torch.dtype | None = None

    @property
    def has_separate_master(self) -> bool:
        """False where the optimizer updates the very parameters that the model computes with."""
        return self.compute != self.master

    @property
    def window_count(self) -> int:
        """Of masters and sums, how many the optimizer sees in another dtype than their own; see `OwnedRange`."""
        if self.master != self.states:
            return 2
        return 1 if self.sums != self.states else 0


FP32 = PrecisionPolicy(compute=torch.float32)
FP16 = PrecisionPolicy(compute=torch.float16)
BF16 = PrecisionPolicy(compute=torch.bfloat16)
#: Parameters are their own masters; gradient sums are 16-bit too, states fp32.
FP16_MASTERS = PrecisionPolicy(torch.float16, torch.float16, torch.float16)
BF16_MASTERS = PrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
#: States are bf16 as well.
PURE_BF16 = PrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16)
