"""Every name that docs/reference/deepspeed-api.md lists is there, or absent with the reason that the page gives."""

from __future__ import annotations

import inspect
import re
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import dsrun
from dsrun.deepspeed_missing import PACKAGE
from dsrun.runtime.engine.deepspeed.missing import ENGINE
from support.models import loss_of
from support.training import batches, config, make_engine

#: Arguments of DeepSpeed 0.19's functions, in order: ours begin with them.
ARGUMENTS = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
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

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deepspeed-api.md"


def rows(section: str) -> list[tuple[list[str], str]]:
    """(names, remark) of each row of the table below a heading."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", first), second.strip()) for first, second in cells]


def names(section: str) -> list[str]:
    return [name for row, _ in rows(section) for name in row]


@pytest.mark.parametrize("name", names("The package"))
def test_a_name_of_the_package_is_there(name: str) -> None:
    found = reduce(getattr, name.split("."), dsrun)
    assert found is not None
    owner: Any = reduce(getattr, name.split(".")[:-1], dsrun)
    assert name.split(".")[-1] in [*dir(owner), *dir(type(owner))]


def test_every_name_of_the_engine_is_there_and_its_own() -> None:
    engine = make_engine(config(3, micro=2))
    for name in names("The engine"):
        assert name in engine.__dict__ or name in engine._modules or hasattr(type(engine), name), name


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


def test_names_that_are_not_there_say_what_to_use_instead_as_the_page_does() -> None:
    engine = make_engine(config(1, micro=2), model=nn.Linear(3, 3))
    listed = {name: remark for (name,), remark in rows("What is not here")}
    assert listed == {**PACKAGE, **{f"engine.{name}": reason for name, reason in ENGINE.items()}}
    for name, remark in listed.items():
        *path, last = name.split(".")
        owner: Any = engine if path == ["engine"] else reduce(getattr, path, dsrun)
        assert not hasattr(owner, last), f"{name} is there now: take it off the list"
        with pytest.raises(AttributeError, match=re.escape(remark)):
            getattr(owner, last)


def test_faces_are_modules_and_an_unknown_name_has_no_reason() -> None:
    for face in (dsrun, dsrun.zero, dsrun.utils, dsrun.comm):
        assert isinstance(face, ModuleType)
        with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'nonsense'$"):
            _ = face.nonsense
