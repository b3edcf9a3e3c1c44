"""Backwards that a script runs itself: `loss.backward()`, `out.backward(grad)`, `engine.scale(loss).backward()`.

How they are told from `torch.autograd.grad`, see [Note: backwards of the script] in zero/hooks/timeline.py; what the
engine does around a backward of either kind, in `engine.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ..compat import keeps_graph, uses_autograd_threads
from ..zero.hooks.timeline import ScriptBackward
from .parts import EngineParts

if TYPE_CHECKING:
    from .report import StepReport

#: Attribute of a loss that `scale` has multiplied.
_SCALED = "_dsrun_scaled"


class ScriptBackwards:
    """Lets an engine count backwards that are not its own, as DeepSpeed's does since 0.18.3."""

    _parts: EngineParts
    _report: StepReport
    #: What `scale` was given since the last backward.
    _scaled_losses: list[Tensor]
    _without_sync: int
    _check_trains: Callable[[str], None]
    _check_states_here: Callable[[str], None]
    _with_loss_scale: Callable[[Tensor], Tensor]
    _begin_backward: Callable[[], None]
    _end_backward: Callable[[], None]
    gradient_accumulation_steps: Callable[[], int]

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale, for a `backward` of the script's own; without fp16 that is the loss.

        Args:
            loss: scalar, computed from the model's output. Do not divide it by the accumulation steps.

        Raises:
            ModelError: the loss is no scalar or has no graph, is scaled already, or the engine has no optimizer.
        """
        self._check_trains("engine.scale")
        check_loss(
            loss,
            "engine.scale",
            hint="reduce it with .mean(); for output.backward(gradient), pass (output * gradient).sum()",
        )
        self._check_not_scaled(loss, "engine.scale")
        if self._needs_scaler and self._parts.step.reducer.has_strays:
            raise ModelError(
                "engine.scale: there are gradients of a backward whose loss has not been multiplied by the loss scale",
                hint="add all losses up, and call engine.scale(loss).backward() on their sum",
            )
        self._scaled_losses.append(loss.detach().reshape(1))
        scaled = self._with_loss_scale(loss)
        if scaled is not loss:
            setattr(scaled, _SCALED, True)
        return scaled

    def _prepare_script_backward(self) -> None:
        """Leaves autograd one queue in this thread, see [Note: one ready queue] in zero/hooks/timeline.py.

        The engine does so for its own backward; that of the script begins where no engine is asked. On a CPU there is
        one queue anyhow.
        """
        if self._has_queues and uses_autograd_threads():
            torch.autograd.set_multithreading_enabled(False)

    @property
    def _has_queues(self) -> bool:
        return self._parts.mesh.device.type != "cpu"

    @property
    def _needs_scaler(self) -> bool:
        return self._parts.loss_scale.is_dynamic or self._parts.loss_scale.value != 1.0

    def _check_not_scaled(self, loss: Tensor, who: str) -> None:
        if getattr(loss, _SCALED, False):
            raise ModelError(
                f"{who}: the loss is multiplied by a loss scale already, by engine.scale",
                hint="call backward() on what engine.scale returns; under fp16 a loss goes through one engine",
            )

    def _stray_factor(self) -> float | None:
        """Returns what a gradient of the script's own is multiplied by to be as one of the engine's; None: unknown."""
        return None if self._needs_scaler else 1.0 / self.gradient_accumulation_steps()

    def _follow_script(self) -> None:
        """Has backwards of the script's own begin and end micro steps; without the engine they are refused."""
        hooks = self._parts.hooks
        begin, end = weakref.WeakMethod(self._begin_script_backward), weakref.WeakMethod(self._end_script_backward)

        def run(method: weakref.WeakMethod[Any]) -> None:
            bound = method()
            assert bound is not None, "hooks forget the engine when it goes"
            bound()

        hooks.follow_script(ScriptBackward(lambda: run(begin), lambda: run(end), hooks.abandon_backward))
        gone = ScriptBackward(
            partial(_refuse_without_engine, self._parts.step.reducer.drop_strays),
            hooks.abandon_backward,
            hooks.abandon_backward,
        )
        weakref.finalize(self, hooks.follow_script, gone).atexit = False

    def _begin_script_backward(self) -> None:
        try:
            self._check_script_backward()
            self._begin_backward()
            self._parts.hooks.before_backward(
                retain_graph=keeps_graph(),
                reduce=not self._without_sync,
                scale=1.0 / self.gradient_accumulation_steps(),
                has_begun=True,
            )
        except BaseException:
            self._parts.step.reducer.drop_strays()
            self._scaled_losses.clear()
            raise
        if self._scaled_losses:
            self._report.add_loss(torch.stack([loss.float() for loss in self._scaled_losses]).sum(dim=0))
        else:
            self._report.miss_loss()
        self._scaled_losses.clear()

    def _end_script_backward(self) -> None:
        self._parts.hooks.after_backward()
        self._end_backward()

    def _check_script_backward(self) -> None:
        """Refuses what cannot be honoured, before the backward has changed anything.

        Raises:
            ModelError: see the messages.
        """
        self._check_trains("loss.backward()")
        self._check_states_here("loss.backward()")
        if torch.is_grad_enabled():
            raise ModelError(
                "loss.backward(create_graph=True): the gradients are reduced as they come, and keep no graph",
                hint="use torch.autograd.grad(..., create_graph=True), which no engine has a part in",
            )
        if self._has_queues and uses_autograd_threads():
            raise ModelError(
                "loss.backward(): autograd's threads are on, so nodes of the CPU would run beside those of the GPU, in "
                "an order that gradients are not reduced by",
                hint="call the engine itself in the thread that runs the backward, which switches them off, or "
                "engine.backward(loss)",
            )
        if self._needs_scaler and not self._scaled_losses:
            raise ModelError(
                "loss.backward(): the loss has not been multiplied by the loss scale, "
                f"{self._parts.loss_scale.value:g}",
                hint="call engine.backward(loss), or engine.scale(loss).backward()",
            )


def check_loss(loss: object, who: str, *, hint: str) -> None:
    """Refuses what no backward can begin with.

    Args:
        loss: that a script has given.
        who: was given it, for the message.
        hint: the way out of a tensor that is no scalar or has no graph.

    Raises:
        ModelError: it is no tensor, no scalar, or has no graph.
    """
    if not isinstance(loss, Tensor):
        raise ModelError(
            f"{who}: the loss is a {type(loss).__name__}; expected a tensor, a scalar computed from the model's output",
            hint="pass the tensor itself: what .item() and float() return has no graph, and a model's output may have "
            "the loss in it, as output.loss or output[0]",
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ModelError(
            f"{who}: the loss has shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}; "
            "expected a scalar computed from the model's output",
            hint=hint,
        )


def _refuse_without_engine(drop_strays: Callable[[], None]) -> NoReturn:
    """Refuses a backward whose gradients nobody would take, see `zero/grads/reducer.py`."""
    drop_strays()
    raise ModelError(
        "loss.backward(): the engine of the model is gone, and the gradients would be lost",
        hint="keep the engine for as long as the model trains, or give the model another one; below "
        "stage 3 engine.destroy() leaves a plain model",
    )
