"""`register_external_parameter`: accepted for scripts written for DeepSpeed, and not needed.

Parameters that a forward reads outside of their own module are found as they are read (`zero/hooks/outside.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from dsrun.errors import ModelError


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Says that the forward of `module` reads `parameter` of another module. Nothing has to be done for that here.

    Raises:
        ModelError: `module` is no module, or `parameter` no parameter.
    """
    _check(module, parameter, "register_external_parameter")


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Takes it back; see `register_external_parameter`.

    Raises:
        ModelError: `module` is no module, or `parameter` no parameter.
    """
    _check(module, parameter, "unregister_external_parameter")


def _check(module: object, parameter: object, who: str) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise ModelError(
            f"{who}: got a {type(module).__name__} and a {type(parameter).__name__}; expected a module and a parameter",
            hint="pass the module whose forward reads the parameter, and then the parameter itself",
        )
