"""dsrun.zero: build a model that no rank could hold, and reach parameters that no rank holds whole.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.engine.compose.construct import Init as Init
    from dsrun.runtime.zero.access.external import register_external_parameter as register_external_parameter
    from dsrun.runtime.zero.access.external import unregister_external_parameter as unregister_external_parameter
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
    from dsrun.runtime.zero.access.gathered import GatheredParameters as GatheredParameters
    from dsrun.runtime.zero.access.gathered import unwrap_model_for_generation as unwrap_model_for_generation
    from dsrun.runtime.zero.creation.pretrained import load_pretrained as load_pretrained
    from dsrun.runtime.zero.partition_parameters import ZeroParamStatus as ZeroParamStatus
    from dsrun.runtime.zero.partition_parameters import is_zero_param as is_zero_param
    from dsrun.runtime.zero.units.leaves import set_leaf_modules as set_leaf_modules
else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.engine.compose.construct": ("Init",),
            "dsrun.runtime.zero.access.external": ("register_external_parameter", "unregister_external_parameter"),
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
            "dsrun.runtime.zero.access.gathered": ("GatheredParameters", "unwrap_model_for_generation"),
            "dsrun.runtime.zero.creation.pretrained": ("load_pretrained",),
            "dsrun.runtime.zero.units.leaves": ("set_leaf_modules",),
            "dsrun.runtime.zero.partition_parameters": ("ZeroParamStatus", "is_zero_param"),
        },
    )
