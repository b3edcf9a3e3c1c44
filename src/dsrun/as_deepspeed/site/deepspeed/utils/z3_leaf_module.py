"""deepspeed.utils.z3_leaf_module: modules whose parameters are gathered together."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.utils": [
            "get_z3_leaf_modules",
            "set_z3_leaf_module",
            "set_z3_leaf_modules",
            "set_z3_leaf_modules_by_name",
            "set_z3_leaf_modules_by_suffix",
            "unset_z3_leaf_modules",
            "unset_z3_leaf_modules_by_name",
            "unset_z3_leaf_modules_by_suffix",
            "z3_leaf_module",
        ]
    },
)
