"""What DeepSpeed's engine answers of its config, an engine of dsrun answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dsrun
from support.training import config, make_engine

#: Recorded from DeepSpeed 0.19.8 for a config with batch sizes and the optimizer AdamW alone.
USUAL: dict[str, Any] = {
    "bf16_master_weights_and_gradients": False,
    "bf16_optimizer_states": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": False,
    "dataloader_drop_last": False,
    "dynamic_loss_scale_args": {
        "init_scale": 65536,
        "scale_window": 1000,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    },
    "fp16_auto_cast": False,
    "fp16_master_weights_and_gradients": False,
    "gradient_predivide_factor": 1.0,
    "initial_dynamic_scale": 65536,
    "loss_scale": 0,
    "managed_gradient_accumulation": True,
    "optimizer_name": "adamw",
    "scheduler_name": None,
    "scheduler_params": None,
    "torch_autocast_enabled": False,
    "torch_autocast_dtype": None,
    "zero_cpu_offload": False,
    "zero_nvme_offload_optimizer": False,
    "zero_offload_optimizer": None,
    "zero_offload_param": None,
    "zero_partial_offload": 1.0,
    "zero_use_cpu_optimizer": False,
}


def test_a_config_with_nothing_special_is_answered_for_as_there() -> None:
    engine = make_engine(config(1, micro=2))
    assert {name: getattr(engine, name)() for name in USUAL} == USUAL
    assert engine.optimizer_params() == {"lr": 1e-2, "weight_decay": 0.1}
    assert engine.communication_data_type == torch.float32
    assert (engine.data_parallel_group, engine.get_data_parallel_rank()) == (dist.group.WORLD, 0)
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1


def test_what_is_set_and_what_the_script_gives_is_answered_for() -> None:
    settings = config(3, micro=2, bf16=True, communication_data_type="fp32")
    settings["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    settings["checkpoint"]["tag_validation"] = "fail"
    engine = make_engine(settings)
    assert (engine.zero_cpu_offload(), engine.zero_use_cpu_optimizer()) == (True, True)
    assert (engine.zero_offload_optimizer().device, engine.zero_offload_param().device) == ("cpu", "cpu")
    assert engine.communication_data_type == torch.float32
    assert (engine.scheduler_name(), engine.scheduler_params()) == ("WarmupLR", {"warmup_num_steps": 4})
    assert engine.checkpoint_tag_validation_fail()
    model = nn.Linear(3, 3)
    given = dsrun.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(1, micro=2)
    )
    assert given[0].optimizer_name() == "SGD"


def test_an_optimizer_on_a_drive_is_not_offloaded_to_the_cpu(tmp_path: Path) -> None:
    settings = config(3, micro=2)
    settings["zero_optimization"] |= {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = make_engine(settings)
    assert not engine.zero_cpu_offload()
    assert (engine.zero_use_cpu_optimizer(), engine.zero_nvme_offload_optimizer()) == (True, True)
    engine.destroy()
