"""Lion: the sign of a running mean, one state in place of Adam's two. Elementwise, so it runs on flat shards as it is.

    c = b1 * m + (1 - b1) * g;   p -= lr * (sign(c) + wd * p);   m = b2 * m + (1 - b2) * g

Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), program 1. The default b2 is DeepSpeed's
0.999, where the paper has 0.99.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from ..structure.base import chunks


class Lion(optim.Optimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate; a third to a tenth of Adam's, for every element moves by it.
        betas: weights of the mean in the step, and in the next mean.
        weight_decay: weight decay, applied to the weights directly and not through the gradient.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Takes one step.

        Args:
            closure: function that computes the loss again, as for torch's optimizers; None for none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            lr, decay = group["lr"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                p_N, g_N, m_N = param.view(-1), param.grad.reshape(-1), state["exp_avg"].view(-1)
                for start, stop in chunks(p_N.numel(), p_N.device):
                    p, g, m = p_N[start:stop], g_N[start:stop], m_N[start:stop]
                    direction = torch.lerp(g, m, b1).sign_()
                    if decay:
                        p.mul_(1 - lr * decay)
                    p.add_(direction, alpha=-lr)
                    m.lerp_(g, 1 - b2)
        return loss
