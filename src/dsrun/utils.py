"""dsrun.utils: names that scripts written for DeepSpeed import from `deepspeed.utils`, each from where it lives.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsrun.deepspeed_missing import missing

if TYPE_CHECKING:
    from dsrun.log_on_ranks import log_dist, log_dist_once, logger, set_log_level_from_string
    from dsrun.runtime.data.repeating import RepeatingLoader
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
    from dsrun.runtime.zero.build.on_device import OnDevice
    from dsrun.runtime.zero.units.leaves import get_leaf_modules as get_z3_leaf_modules
    from dsrun.runtime.zero.units.leaves import is_leaf as z3_leaf_module
    from dsrun.runtime.zero.units.leaves import set_leaf_module as set_z3_leaf_module
    from dsrun.runtime.zero.units.leaves import set_leaf_modules as set_z3_leaf_modules
    from dsrun.runtime.zero.units.leaves import set_leaf_modules_by_name as set_z3_leaf_modules_by_name
    from dsrun.runtime.zero.units.leaves import set_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
    from dsrun.runtime.zero.units.leaves import unset_leaf_modules as unset_z3_leaf_modules
    from dsrun.runtime.zero.units.leaves import unset_leaf_modules_by_name as unset_z3_leaf_modules_by_name
    from dsrun.runtime.zero.units.leaves import unset_leaf_modules_by_suffix as unset_z3_leaf_modules_by_suffix

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "log_dist_once",
    "logger",
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
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "unset_z3_leaf_modules_by_name",
    "unset_z3_leaf_modules_by_suffix",
    "z3_leaf_module",
]

_HOME = {
    "OnDevice": "dsrun.runtime.zero.build.on_device",
    "RepeatingLoader": "dsrun.runtime.data.repeating",
    **dict.fromkeys(("log_dist", "log_dist_once", "logger", "set_log_level_from_string"), "dsrun.log_on_ranks"),
    **{name: "dsrun.runtime.zero.access.fragments" for name in __all__ if name.startswith("safe_")},
    **{name: "dsrun.runtime.zero.units.leaves" for name in __all__ if "z3_leaf" in name},
}
#: Names that are others where they live.
_THERE = {name: name.replace("_z3_", "_") for name in __all__ if "_z3_" in name} | {"z3_leaf_module": "is_leaf"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise missing(__name__, name)
    import importlib

    return getattr(importlib.import_module(_HOME[name]), _THERE.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
