"""torch's own `state_dict` and `load_state_dict` on a model whose parameters an engine has: right, or refused by name.

Inside `GatheredParameters` they work as on any model. What exports a whole model unit by unit is the engine's business.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dsrun.errors import ModelError

from .partition_parameters import home_of, is_zero_param

_WATCHED = "_dsrun_watched"


def watch_state_dicts(model: nn.Module) -> None:
    """Lets every module of the model, on its own too, refuse what would be wrong without anybody noticing."""
    for module in model.modules():
        watch_state_dict(module)


def watch_state_dict(module: nn.Module) -> None:
    """Does so for one module, once."""
    if _WATCHED not in module.__dict__:
        module.__dict__[_WATCHED] = True
        module.register_state_dict_pre_hook(_check_readable)
        module.register_load_state_dict_pre_hook(_check_writable)


def _check_readable(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name, param in module.named_parameters(recurse=False):
        home = home_of(param)
        if home is not None:
            home.settle()
        if not is_zero_param(param):
            continue
        if home is not None and not home.is_open:
            raise ModelError(
                f"{type(module).__name__}.state_dict: `{prefix}{name}` is sharded: at ZeRO stage 3 no rank holds the "
                "whole model",
                hint="use engine.module_state_dict() or engine.save_checkpoint, or call it inside "
                "dsrun.zero.GatheredParameters(module.parameters())",
            )


def _check_writable(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, param in module.named_parameters(recurse=False):
        home = home_of(param)
        if home is not None and f"{prefix}{name}" in state_dict and not home.is_writable:
            raise ModelError(
                f"{type(module).__name__}.load_state_dict: the engine has taken `{prefix}{name}` over, and its fp32 "
                "master would not hear of new values",
                hint="use engine.load_module_state_dict or engine.load_checkpoint, or call it inside "
                "dsrun.zero.GatheredParameters(module.parameters(), modifier_rank=0)",
            )
