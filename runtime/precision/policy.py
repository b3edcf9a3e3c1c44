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
        master: parameters as the optimizer updates them, its states, and accumulated gradients.
    """

    compute: torch.dtype
    master: torch.dtype = torch.float32

    @property
    def has_separate_master(self) -> bool:
        """False where the optimizer updates the very parameters that the model computes with."""
        return self.compute != self.master


FP32 = PrecisionPolicy(compute=torch.float32)
FP16 = PrecisionPolicy(compute=torch.float16)
BF16 = PrecisionPolicy(compute=torch.bfloat16)
#: Parameters are their own masters; gradient sums and states are bf16 too.
PURE_BF16 = PrecisionPolicy(compute=torch.bfloat16, master=torch.bfloat16)
