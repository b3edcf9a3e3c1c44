"""Backwards that a script runs itself: `loss.backward()`, `out.backward(grad)`, `engine.scale(loss).backward()`.

How they are told from `torch.autograd.grad`, see [Note: backwards of the script] in zero/hooks/unit_calls.py; what the
engine does around a backward of either kind, in `backward.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...compat import keeps_graph, uses_autograd_threads
from ...mesh.join.groups import ProcessGroupMesh
from ...zero.grads.reducer import GradReducer
from ...zero.hooks.modules import UnitHooks
from ...zero.hooks.unit_calls import ScriptBackward
from ..progress import Progress
from ..report import StepReport
from .backward import Backwards

#: Attribute of a loss that `scale` has multiplied.
_SCALED = "_dsrun_scaled"


class ScriptBackwards:
    """Lets an engine count backwards that are not its own, as DeepSpeed's does since 0.18.3.

    Args:
        mesh: Device that training uses.
        hooks: Hooks of the units.
        reducer: Reducer of the gradients, which takes those of a script's backward.
        backwards: Acts before and after a backward that counts.
        progress: Place in the global batch of this rank.
        report: Sum of the losses of a step.
        check: Function that refuses a call, named by its argument, while the engine cannot train.
    """

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        hooks: UnitHooks,
        reducer: GradReducer,
        backwards: Backwards,
        progress: Progress,
        *,
        report: StepReport,
        check: Callable[[str], None],
    ) -> None:
        self._has_queues = mesh.device.type != "cpu"
        self._hooks = hooks
        self._reducer = reducer
        self._backwards = backwards
        self._progress = progress
        self._report = report
        self._check = check
        self._scaled_losses: list[Tensor] = []  # since the last backward

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale, see `Engine.scale`."""
        self._check("engine.scale")
        check_loss(
            loss,
            "engine.scale",
            hint="reduce it with .mean(); for output.backward(gradient), pass (output * gradient).sum()",
        )
        check_not_scaled(loss, "engine.scale")
        if self._backwards.needs_scaler and self._reducer.has_strays:
            raise ModelError(
                "engine.scale: there are gradients of a backward whose loss has not been multiplied by the loss scale",
                hint="add all losses up, and call engine.scale(loss).backward() on their sum",
            )
        self._scaled_losses.append(loss.detach().reshape(1))
        scaled = self._backwards.with_loss_scale(loss)
        if scaled is not loss:
            setattr(scaled, _SCALED, True)
        return scaled

    def prepare(self) -> None:
        """Leaves autograd one queue in this thread, see [Note: one ready queue] in zero/hooks/unit_calls.py.

        The engine does so for its own backward; that of the script begins where no engine is asked. On a CPU there is
        one queue anyhow.
        """
        if self._has_queues and uses_autograd_threads():
            torch.autograd.set_multithreading_enabled(False)

    def forget(self) -> None:
        """Forgets losses that `scale` was given."""
        self._scaled_losses.clear()

    def follow(self, engine: object) -> None:
        """Has backwards of the script's own begin and end micro steps; without the engine they are refused.

        Args:
            engine: Engine whose end ends this; it is not kept alive.
        """
        hooks = self._hooks
        begin, end = weakref.WeakMethod(self._begin), weakref.WeakMethod(self._end)

        def run(method: weakref.WeakMethod[Any]) -> None:
            bound = method()
            assert bound is not None, "hooks forget the engine when it goes"
            bound()

        hooks.follow_script(ScriptBackward(lambda: run(begin), lambda: run(end), hooks.abandon_backward))
        gone = ScriptBackward(
            partial(_refuse_without_engine, self._reducer.drop_strays),
            hooks.abandon_backward,
            hooks.abandon_backward,
        )
        weakref.finalize(engine, hooks.follow_script, gone).atexit = False

    def _begin(self) -> None:
        try:
            self._check_backward()
            self._backwards.begin()
            self._hooks.before_backward(
                retain_graph=keeps_graph(),
                reduce=not self._progress.open_no_sync,
                scale=1.0 / self._progress.answers.gradient_accumulation_steps(),
                has_begun=True,
            )
        except BaseException:
            self._reducer.drop_strays()
            self._scaled_losses.clear()
            raise
        if self._scaled_losses:
            self._report.add_loss(torch.stack([loss.float() for loss in self._scaled_losses]).sum(dim=0))
        else:
            self._report.miss_loss()
        self._scaled_losses.clear()

    def _end(self) -> None:
        self._hooks.after_backward()
        self._backwards.end()

    def _check_backward(self) -> None:
        """Refuses what cannot be honoured, before the backward has changed anything.

        Raises:
            ModelError: see the messages.
        """
        self._check("loss.backward()")
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
        if self._backwards.needs_scaler and not self._scaled_losses:
            raise ModelError(
                f"loss.backward(): the loss has not been multiplied by the loss scale, {self._backwards.loss_scale:g}",
                hint="call engine.backward(loss), or engine.scale(loss).backward()",
            )


def check_not_scaled(loss: Tensor, who: str) -> None:
    """Refuses a loss that `scale` has multiplied already.

    Args:
        loss: Loss that a script has given.
        who: Name of the call, for the message.

    Raises:
        ModelError: it is one.
    """
    if getattr(loss, _SCALED, False):
        raise ModelError(
            f"{who}: the loss is multiplied by a loss scale already, by engine.scale",
            hint="call backward() on what engine.scale returns; under fp16 a loss goes through one engine",
        )


def check_loss(loss: object, who: str, *, hint: str) -> None:
    """Refuses what no backward can begin with.

    Args:
        loss: loss that a script has given, of any type.
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
