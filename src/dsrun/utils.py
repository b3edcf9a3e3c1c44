"""dsrun.utils: names that scripts written for DeepSpeed import from `deepspeed.utils`, each from where it lives.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.log_on_ranks import log_dist as log_dist
    from dsrun.log_on_ranks import log_dist_once as log_dist_once
    from dsrun.log_on_ranks import logger as logger
    from dsrun.log_on_ranks import set_log_level_from_string as set_log_level_from_string
    from dsrun.runtime.data.repeating import RepeatingLoader as RepeatingLoader
    from dsrun.runtime.zero.access.fragments import safe_get_full_fp32_param as safe_get_full_fp32_param
    from dsrun.runtime.zero.access.fragments import safe_get_full_grad as safe_get_full_grad
    from dsrun.runtime.zero.access.fragments import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from dsrun.runtime.zero.access.fragments import safe_get_local_fp32_param as safe_get_local_fp32_param
    from dsrun.runtime.zero.access.fragments import safe_get_local_grad as safe_get_local_grad
    from dsrun.runtime.zero.access.fragments import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from dsrun.runtime.zero.access.fragments import safe_set_full_fp32_param as safe_set_full_fp32_param
    from dsrun.runtime.zero.access.fragments import safe_set_full_grad as safe_set_full_grad
    from dsrun.runtime.zero.access.fragments import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from dsrun.runtime.zero.access.fragments import safe_set_local_fp32_param as safe_set_local_fp32_param
    from dsrun.runtime.zero.access.fragments import safe_set_local_grad as safe_set_local_grad
    from dsrun.runtime.zero.access.fragments import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from dsrun.runtime.zero.access.fragments import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized
    from dsrun.runtime.zero.creation.on_device import OnDevice as OnDevice
    from dsrun.runtime.zero.units import leaves

    get_z3_leaf_modules = leaves.get_leaf_modules
    set_z3_leaf_module = leaves.set_leaf_module
    set_z3_leaf_modules = leaves.set_leaf_modules
    set_z3_leaf_modules_by_name = leaves.set_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix = leaves.set_leaf_modules_by_suffix
    unset_z3_leaf_modules = leaves.unset_leaf_modules
    unset_z3_leaf_modules_by_name = leaves.unset_leaf_modules_by_name
    unset_z3_leaf_modules_by_suffix = leaves.unset_leaf_modules_by_suffix
    z3_leaf_module = leaves.is_leaf

else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.log_on_ranks": ("log_dist", "log_dist_once", "logger", "set_log_level_from_string"),
            "dsrun.runtime.data.repeating": ("RepeatingLoader",),
            "dsrun.runtime.zero.access.fragments": (
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
            ),
            "dsrun.runtime.zero.creation.on_device": ("OnDevice",),
            "dsrun.runtime.zero.units.leaves": (
                "get_leaf_modules as get_z3_leaf_modules",
                "is_leaf as z3_leaf_module",
                "set_leaf_module as set_z3_leaf_module",
                "set_leaf_modules as set_z3_leaf_modules",
                "set_leaf_modules_by_name as set_z3_leaf_modules_by_name",
                "set_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix",
                "unset_leaf_modules as unset_z3_leaf_modules",
                "unset_leaf_modules_by_name as unset_z3_leaf_modules_by_name",
                "unset_leaf_modules_by_suffix as unset_z3_leaf_modules_by_suffix",
            ),
        },
    )
