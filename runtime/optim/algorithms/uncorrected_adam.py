"""Adam without bias correction: running means that start at zero are used as they are. Elementwise.

    m = b1 * m + (1 - b1) * g;   v = b2 * v + (1 - b2) * g^2;   p -= lr * (m / (sqrt(v) + eps) + wd * p)

Torch's Adam always divides both means by 1 - b^t. Without that the first steps are larger, by (1 - b1) / sqrt(1 - b2):
3.2 times with the usual betas. BERT was trained so, and whoever goes on with such a run needs it.

Source: DeepSpeed, csrc/adam/multi_tensor_adam.cu, where both corrections are 1; weight decay apart from the gradient
(AdamW) or in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from dsrun.errors import ModelError

from ..structure.base import chunks


class UncorrectedAdam(optim.Optimizer):
    """See the head of the file.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the denominator of the update.
        weight_decay: weight decay.
        decoupled_weight_decay: whether weight decay is applied to the weights directly (AdamW) and not through the
            gradient.
        amsgrad: whether to use AMSGrad; must be false, as in DeepSpeed.

    Raises:
        ModelError: `amsgrad` is true.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ModelError(
                "Adam: amsgrad is true and bias_correction is false, which do not go together", hint="leave one out"
            )
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

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
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                p_N, g_N = param.view(-1), param.grad.reshape(-1)
                m_N, v_N = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
                for start, stop in chunks(p_N.numel(), p_N.device):
                    part = slice(start, stop)
                    _move(p_N[part], g_N[part], m_N[part], v_N[part], group)
        return loss


def _move(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, group: dict[str, Any]) -> None:
    """Updates weights and means of the same shape in place; gradients are read only."""
    (b1, b2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    if decay and group["decoupled_weight_decay"]:
        p.mul_(1 - lr * decay)
    elif decay:
        g = g.add(p, alpha=decay)
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-lr)
