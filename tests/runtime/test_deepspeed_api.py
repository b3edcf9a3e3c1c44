"""DeepSpeed's names under dsrun's own, and on the engine: what docs/reference/deepspeed-api.md lists is there.

What is not says why, as the page does. What `import deepspeed` gives: tests/shared/as_deepspeed/test_names.py.
"""

from __future__ import annotations

import inspect
import re
from functools import reduce
from types import ModuleType
from typing import Any

import deepspeed_api
import pytest
from torch import nn

import dsrun
from dsrun.deepspeed_missing import BY_NAME
from dsrun.runtime.accelerator import get_accelerator
from dsrun.runtime.engine.deepspeed.missing import ENGINE
from support import deepspeed_engine
from support.deepspeed_names import KNOWN, ROWS, SURFACE
from support.models import loss_of
from support.training import batches, config, make_engine

#: Arguments of DeepSpeed 0.19's functions, in order: ours begin with them.
ARGUMENTS = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
    "tp_model_init": "model tp_size dtype config",
    "add_config_arguments": "parser",
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "comm.get_local_rank": "",
    "OnDevice": "dtype device enabled",
    "utils.z3_leaf_module": "model",
    "utils.set_z3_leaf_module": "model flag",
    "utils.set_z3_leaf_modules": "model leaf_module_classes raise_if_not_found",
    "utils.unset_z3_leaf_modules": "model leaf_module_classes raise_if_not_found",
    "utils.get_z3_leaf_modules": "model",
    "utils.set_z3_leaf_modules_by_name": "model module_names flag raise_if_not_found",
    "utils.set_z3_leaf_modules_by_suffix": "model module_name_suffixes flag raise_if_not_found",
    **{
        f"utils.safe_{verb}_{name}": arguments
        for verb, name, arguments in (
            *(("get", f"{part}_{what}", "param") for part in ("full", "local") for what in ("fp32_param", "grad")),
            *(
                ("set", f"{part}_{what}", "param value")
                for part in ("full", "local")
                for what in ("fp32_param", "grad")
            ),
            *(("get", f"{part}_optimizer_state", "param optim_state_key") for part in ("full", "local")),
            *(("set", f"{part}_optimizer_state", "param value optim_state_key") for part in ("full", "local")),
        )
    },
    "utils.safe_update_full_grad_vectorized": "param_list update_func",
    "utils.log_dist": "message ranks level",
    "utils.log_dist_once": "message ranks level",
    "utils.set_log_level_from_string": "log_level_str custom_logger",
    "utils.RepeatingLoader": "loader",
    "zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config "
    "enabled dtype mpu",
    "zero.GatheredParameters": "params modifier_rank fwd_module enabled",
    "zero.register_external_parameter": "module parameter",
    "zero.unregister_external_parameter": "module parameter",
    "zero.unwrap_model_for_generation": "model",
    "ops.adam.FusedAdam": "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    "ops.adam.DeepSpeedCPUAdam": "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
    "fp32_optimizer_states",
    "ops.adagrad.DeepSpeedCPUAdagrad": "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
}

ENGINE_NAMES = [name for row in deepspeed_engine.ROWS for name in row.names.split()]


def test_the_page_is_made_from_the_tables() -> None:
    assert deepspeed_api.PAGE.read_text() == deepspeed_api.page(), "run `python scripts/deepspeed_api.py`"


def test_names_of_the_package_are_there() -> None:
    for row in ROWS:
        for path in row.paths(row.modules_in_order()[0]) if row.is_own() else ():
            owner: Any = reduce(getattr, path.split(".")[:-1], dsrun)
            assert getattr(owner, path.split(".")[-1]) is not None, path
            # What `comm` has of torch.distributed, it does not list.
            assert row.home == "torch.distributed" or path.split(".")[-1] in dir(owner), path


def test_names_that_only_drop_in_mode_has_say_so() -> None:
    owners = ("", "utils", "zero", "comm", "checkpointing")
    said: list[str] = []
    for known in KNOWN:
        owner, _, name = known.path.rpartition(".")
        module: Any = reduce(getattr, owner.split("."), dsrun) if owner in owners and owner else dsrun
        if owner in owners and not hasattr(module, name) and "version_names" not in known.home:
            with pytest.raises(AttributeError, match=r"`dsrun --as-deepspeed`$"):
                getattr(module, name)
            said.append(known.path)
    assert "get_accelerator" in said
    assert "utils.zero_to_fp32" not in said
    for name in ("accelerator", "elasticity", "checkpoint"):
        with pytest.raises(AttributeError, match=r"`dsrun --as-deepspeed`$"):
            getattr(dsrun, name)


def test_every_name_of_the_engine_is_there_and_its_own() -> None:
    engine = make_engine(config(3, micro=2))
    for name in ENGINE_NAMES:
        assert name in engine.__dict__ or name in engine._modules or hasattr(type(engine), name), name


def test_methods_of_the_engine_take_what_deepspeeds_take() -> None:
    methods = SURFACE["class runtime.engine.DeepSpeedEngine"]
    for row in deepspeed_engine.ROWS:
        for name in row.names.split():
            wanted = [part for part in methods.get(name, ()) if part not in row.lacks.split()]
            found = inspect.signature(getattr(dsrun.Engine, name)).parameters if wanted else {}
            assert [part for part in found if part in wanted] == wanted, name


def test_every_method_of_deepspeeds_engines_is_in_the_table_or_has_a_reason() -> None:
    methods = {*SURFACE["class runtime.engine.DeepSpeedEngine"], *SURFACE["class runtime.pipe.engine.PipelineEngine"]}
    assert sorted(methods - {*ENGINE_NAMES, *ENGINE}) == []


def test_every_method_of_deepspeeds_accelerators_is_there_or_has_a_reason() -> None:
    accelerator = get_accelerator()
    for name, wanted in SURFACE["class accelerator.abstract_accelerator.DeepSpeedAccelerator"].items():
        if hasattr(accelerator, name):
            found: Any = getattr(accelerator, name)
            taken = inspect.signature(found).parameters if wanted else ()
            assert [part for part in taken if part in wanted] == list(wanted), name
        else:
            with pytest.raises(AttributeError, match=f"get_accelerator\\(\\).{name} is not there: .+"):
                getattr(accelerator, name)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_names_and_the_order_of_deepspeeds(name: str) -> None:
    expected = ARGUMENTS[name].split()
    found = inspect.signature(reduce(getattr, name.split("."), dsrun)).parameters
    assert list(found)[: len(expected)] == expected
    more = list(found.values())[len(expected) :]
    assert all(p.kind is p.KEYWORD_ONLY or p.default is not p.empty for p in more)


@pytest.mark.parametrize("stage", [1, 3])
def test_forward_by_its_name_is_a_call_of_the_engine(stage: int) -> None:
    losses: list[list[float]] = []
    for call in ("__call__", "forward"):
        engine = make_engine(config(stage, micro=2, bf16=True))
        losses.append([])
        for step in range(2):
            inputs, targets = batches(step, samples=2)
            loss = loss_of(getattr(engine, call)(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1]


def test_names_that_are_not_there_say_what_to_use_instead() -> None:
    for name in (name for name in BY_NAME if not name.endswith(".*")):
        owner: Any = dsrun
        for part in name.split("."):
            if not hasattr(owner, part):
                break
            owner = getattr(owner, part)
        else:
            pytest.fail(f"{name} is there now: take it off the list")
        if "__getattr__" in vars(owner):  # else a package of dsrun's own, and no face
            with pytest.raises(AttributeError, match=f"({re.escape(BY_NAME[name])}|`dsrun --as-deepspeed`)$"):
                getattr(owner, part)


def test_names_of_the_engine_that_are_not_there_say_what_to_use_instead() -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 3))
    for name, reason in ENGINE.items():
        assert not hasattr(engine, name), f"{name} is there now: take it off the list"
        with pytest.raises(AttributeError, match=re.escape(reason)):
            getattr(engine, name)


def test_faces_are_modules_and_an_unknown_name_has_no_reason() -> None:
    for face in (dsrun, dsrun.zero, dsrun.utils, dsrun.comm):
        assert isinstance(face, ModuleType)
        with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'nonsense'$"):
            _ = face.nonsense
