"""torch's own `state_dict` and `load_state_dict` on a model whose parameters an engine has: right, or refused by name.

Inside `GatheredParameters` they work as on any model. Outside, a state dict has all keys, shapes and dtypes, and who
asks it for a value that is not here is refused. What exports a whole model unit by unit is the engine's business.
Of parameters that are cut over ranks it has this rank's parts, as in DeepSpeed, which is said once.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from dsrun.contract.environment import is_first_rank
from dsrun.errors import ModelError

from ..params.absent_values import AbsentTensor
from ..partition_parameters import ShardedParameter, ZeroParamStatus, home_of, is_zero_param, set_class
from ..units.released import ReleasedParameter
from .pieces import UnitHome

_log = logging.getLogger(__name__)

_WATCHED = "_dsrun_watched"


def watch_state_dicts(model: nn.Module) -> None:
    """Lets every module of the model, on its own too, refuse what would be wrong without anybody noticing."""
    for module in model.modules():
        watch_state_dict(module)


def watch_state_dict(module: nn.Module) -> None:
    """Does so for one module, once."""
    if _WATCHED not in module.__dict__:
        module.__dict__[_WATCHED] = True
        module.register_state_dict_pre_hook(_wait_for_updates)
        module.register_state_dict_post_hook(_leave_out_values)
        module.register_load_state_dict_pre_hook(_check_writable)


def _wait_for_updates(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for param in module.parameters(recurse=False):
        home = home_of(param)
        if home is not None:
            home.wait_update()
            if isinstance(param, ReleasedParameter) and not home.is_open:
                set_class(param, ShardedParameter)  # torch puts it in as it lies, and nothing is gathered for that


def _leave_out_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """What torch has put in of a sharded parameter is a view of memory that holds other values now, or none."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        home, key = home_of(param), f"{prefix}{name}"
        if isinstance(home, UnitHome):
            _tell_of_parts(home, key)
        if home is None or home.is_open or not is_zero_param(param):
            continue
        if home.status() is not ZeroParamStatus.AVAILABLE:
            set_class(param, ReleasedParameter)
        found = state_dict.get(key)
        if found is not None and found is not param:  # the parameter itself: `keep_vars`
            state_dict[key] = AbsentTensor.of(param, f"`{key}` of {type(module).__name__}.state_dict()")


def _tell_of_parts(home: UnitHome, key: str) -> None:
    """Says, once for an engine, that a state dict has parts: saved by one rank, they would pass for the whole."""
    access, cut_over = home.access, () if home.unit is None else home.unit.placement.cut_over
    if cut_over and not access.told_of_parts:
        access.told_of_parts = True
        if is_first_rank():
            _log.warning(
                "state_dict() has this rank's part of `%s`, and of all else that is cut over %s: "
                "engine.module_state_dict() has whole tensors",
                key,
                " and ".join(cut_over),
            )


def _check_writable(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, param in module.named_parameters(recurse=False):
        home, value = home_of(param), state_dict.get(f"{prefix}{name}")
        if home is None or home.is_writable or not isinstance(value, Tensor) or value.shape != param.shape:
            continue  # what does not fit, torch refuses with all that does not
        if isinstance(home, UnitHome) and not is_zero_param(param):
            home.settle()
            home.access.set_exactly(home, value)  # before torch does, for masters take all digits
        else:
            raise ModelError(
                f"{type(module).__name__}.load_state_dict: `{prefix}{name}` is in pieces on all ranks",
                hint="use engine.load_module_state_dict or engine.load_checkpoint, or call it inside "
                "dsrun.zero.GatheredParameters(module.parameters(), modifier_rank=0)",
            )
