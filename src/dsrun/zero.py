"""dsrun.zero: build a model that no rank could hold, and reach parameters that no rank holds whole.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsrun.deepspeed_missing import missing

if TYPE_CHECKING:
    from dsrun.runtime.engine.compose.construct import Init
    from dsrun.runtime.zero.access.external import register_external_parameter, unregister_external_parameter
    from dsrun.runtime.zero.access.fragments import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from dsrun.runtime.zero.access.gathered import GatheredParameters, unwrap_model_for_generation
    from dsrun.runtime.zero.build.pretrained import load_pretrained
    from dsrun.runtime.zero.units.leaves import set_leaf_modules
    from dsrun.runtime.zero.units.partition_parameters import ZeroParamStatus, is_zero_param

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "is_zero_param",
    "load_pretrained",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_leaf_modules",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

_ZERO = "dsrun.runtime.zero"
_HOME = {name: f"{_ZERO}.access.fragments" for name in __all__ if name.startswith("safe_")} | {
    "GatheredParameters": f"{_ZERO}.access.gathered",
    "Init": "dsrun.runtime.engine.compose.construct",
    "load_pretrained": f"{_ZERO}.build.pretrained",
    "ZeroParamStatus": f"{_ZERO}.units.partition_parameters",
    "set_leaf_modules": f"{_ZERO}.units.leaves",
    "is_zero_param": f"{_ZERO}.units.partition_parameters",
    "register_external_parameter": f"{_ZERO}.access.external",
    "unregister_external_parameter": f"{_ZERO}.access.external",
    "unwrap_model_for_generation": f"{_ZERO}.access.gathered",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise missing(__name__, name)
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
