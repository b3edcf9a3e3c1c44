"""DeepSpeed's optimizer classes by their names and arguments, for scripts that import and make them.

There is one implementation of each: the same class steps on the CPU and on CUDA, and nothing is compiled.
"""

from __future__ import annotations

from typing import Any

from torch import optim

from dsrun.errors import ModelError

from .lamb import Lamb
from .lion import Lion


class FusedAdam(optim.Adam):
    """torch's fused Adam with DeepSpeed's arguments.

    Args:
        params: parameters or group dicts.
        lr: learning rate.
        bias_correction: whether to correct the running means for their start at zero; must be true.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the denominator of the update.
        adam_w_mode: decay weights apart from the gradient.
        weight_decay: weight decay.
        amsgrad: whether to divide by the largest mean of squared gradients so far.
        set_grad_none: flag accepted for compatibility, without effect; gradients are views that the engine zeroes.

    Raises:
        ModelError: `bias_correction` is false.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ModelError(
                f"{type(self).__name__}: bias_correction is False, and this class always corrects the running means",
                hint='leave it out, or have the config make the optimizer: "bias_correction": false in '
                "`optimizer.params`",
            )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )
        # Not as an argument: parameters of a model on the meta device have no fused kernel, their shards have.
        for group in self.param_groups:
            group["fused"] = True


class DeepSpeedCPUAdam(FusedAdam):
    """torch's fused Adam with the arguments of DeepSpeed's Adam for offload.

    Args:
        model_params: parameters or group dicts.
        lr: learning rate.
        bias_correction: whether to correct the running means for their start at zero; must be true.
        betas: decay of the running means of gradient and squared gradient.
        eps: number added to the denominator of the update.
        weight_decay: weight decay.
        amsgrad: whether to divide by the largest mean of squared gradients so far.
        adamw_mode: decay weights apart from the gradient.
        fp32_optimizer_states: whether states are in fp32; must be true, and states have the dtype of the masters.

    Raises:
        ModelError: `bias_correction` or `fp32_optimizer_states` is false.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ModelError(
                "DeepSpeedCPUAdam: fp32_optimizer_states is False; states have the dtype of the masters",
                hint="leave it out",
            )
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad(optim.Adagrad):
    """torch's Adagrad with DeepSpeed's arguments.

    Args:
        model_params: parameters or group dicts.
        lr: learning rate.
        eps: number added to the denominator of the update.
        weight_decay: weight decay, added to the gradient.
        amsgrad: whether to use AMSGrad; must be false, since Adagrad has no such variant.
        fp32_optimizer_states: flag accepted for compatibility, without effect.

    Raises:
        ModelError: `amsgrad` is true.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ModelError("DeepSpeedCPUAdagrad: amsgrad is True, which Adagrad has not", hint="leave it out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


FusedLamb = Lamb
FusedLion = Lion
DeepSpeedCPULion = Lion
