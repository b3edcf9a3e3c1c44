"""Loss scales follow overflows as DeepSpeed's do, and what its checkpoints hold pickled is found at its paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dsrun.as_deepspeed.search_path import SITE
from dsrun.errors import InputError, ModelError
from dsrun.runtime.deepspeed.loss_scalers import DynamicLossScaler, LossScaler, create_loss_scaler
from dsrun.zero import safe_get_full_grad, safe_set_full_grad
from support.cli import clean_environment
from support.models import loss_of
from support.training import batches, config, make_engine

OVERFLOWS = [bool(int(digit)) for digit in "0001000011100001001010"]
#: Scale and overflows left, after each step; recorded from DeepSpeed 0.19.8 with a first scale of 256, a window of 3,
#: by `delayed_shift` and `consecutive_hysteresis`.
RECORDED = {
    (1, False): (
        "256:1 256:1 256:1 128:1 128:1 128:1 128:1 256:1 128:1 64:1 32:1 "
        "32:1 32:1 32:1 64:1 32:1 32:1 32:1 16:1 16:1 8:1 8:1"
    ),
    (2, False): (
        "256:2 256:2 256:2 256:1 256:1 256:1 256:1 512:2 512:1 256:1 128:1 "
        "128:1 128:1 128:1 256:2 256:1 256:1 256:1 128:1 128:1 64:1 64:1"
    ),
    (2, True): (
        "256:2 256:2 256:2 256:1 256:2 256:2 256:2 512:2 512:1 256:1 128:1 "
        "128:2 128:2 128:2 256:2 256:1 256:2 256:2 256:1 256:2 256:1 256:2"
    ),
    (3, False): (
        "256:3 256:3 256:3 256:2 256:2 256:2 256:2 512:3 512:2 512:1 256:1 "
        "256:1 256:1 256:1 512:3 512:2 512:2 512:2 512:1 512:1 256:1 256:1"
    ),
}


@pytest.mark.parametrize(("shift", "consecutive"), RECORDED)
def test_a_scale_follows_overflows_as_deepspeeds_does(shift: int, consecutive: bool) -> None:
    scaler = DynamicLossScaler(256, 3, 1, shift, consecutive)
    found: list[str] = []
    for overflow in OVERFLOWS:
        scaler.update_scale(overflow)
        found.append(f"{scaler.loss_scale:g}:{scaler.cur_hysteresis}")
    assert found == RECORDED[shift, consecutive].split()


def test_an_overflow_at_the_lowest_scale_is_an_error_unless_it_is_allowed() -> None:
    scaler = DynamicLossScaler(1, 3, 1, 1, False)
    with pytest.raises(ModelError, match="overflow at 1, the lowest scale"):
        scaler.update_scale(True)
    allowed = DynamicLossScaler(1, 3, 1, 1, False, raise_error_at_min_scale=False)
    allowed.update_scale(True)
    assert allowed.loss_scale == 1


def test_a_loss_is_scaled_and_overflows_are_found() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    scaler = LossScaler(8)
    scaler.backward((weight * 3).sum())
    assert weight.grad is not None
    assert weight.grad.item() == 24
    assert [part.item() for part in scaler.scale_gradient(None, [torch.tensor(2.0)], None)] == [16]
    scaler.update_scale(True)
    assert scaler.loss_scale == 8
    assert not scaler.has_overflow([weight])
    dynamic = DynamicLossScaler(8, 3, 1, 1, False)
    assert not dynamic.has_overflow_serial([weight])
    weight.grad.fill_(torch.inf)
    assert dynamic.has_overflow_serial([weight, nn.Parameter(torch.zeros(1))])


def test_overflows_of_an_engines_gradients_are_found_where_param_grad_is_none() -> None:
    engine = make_engine(config(0, micro=4, gradient_clipping=0.0))
    inputs, targets = batches(0, samples=4)
    engine.backward(loss_of(engine(inputs), targets))
    scaler, params = DynamicLossScaler(8, 3, 1, 1, False), list(engine.module.parameters())
    assert not scaler.has_overflow_serial(params)
    grad = safe_get_full_grad(params[0])
    assert params[0].grad is None
    assert grad is not None
    safe_set_full_grad(params[0], torch.full_like(grad, torch.inf))
    assert scaler.has_overflow_serial(iter(params))
    engine.destroy()


def test_a_scaler_is_made_for_the_dtype() -> None:
    made = create_loss_scaler(torch.float16, 128, False, None)
    assert (type(made), made.loss_scale, made.dynamic) == (LossScaler, 128, False)
    assert create_loss_scaler(torch.bfloat16, 128, True, None).loss_scale == 1
    args = {
        "init_scale": 4,
        "scale_window": 5,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
    }
    dynamic = create_loss_scaler(torch.float16, 0, True, args)
    assert (type(dynamic), dynamic.loss_scale, dynamic.dynamic) == (DynamicLossScaler, 4, True)
    with pytest.raises(InputError, match="dynamic_loss_args is None"):
        create_loss_scaler(torch.float16, 0, True, None)


_READ = """
import pickle, sys
import torch
sys.path.insert(0, {site!r})

def pickled(module, name, *state):
    "What pickle writes of an object of that class, protocol 2, without the class."
    head = b"\\x80\\x02c" + f"{{module}}\\n{{name}}\\n".encode()
    return head + state[0]

state = pickle.dumps({{"cur_scale": 512, "dynamic": True, "dtype": torch.float16}}, protocol=2)[2:-1]
fields = pickle.dumps({{"numel": 256, "start": 16}}, protocol=2)[2:-1]
made = ")\\x81".encode("latin-1")
scaler = pickle.loads(pickled("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", made + state + b"b."))
place = pickle.loads(pickled("deepspeed.utils.tensor_fragment", "fragment_address", made + fields + b"b."))
stage = pickle.loads(pickled("deepspeed.runtime.zero.config", "ZeroStageEnum", b"K\\x02\\x85R."))
assert (scaler.loss_scale, scaler.dtype, place.numel, place.start) == (512, torch.float16, 256, 16)

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
assert type(scaler) is DynamicLossScaler and type(place) is fragment_address and stage is ZeroStageEnum.gradients
saved = {{"loss_scaler": [scaler, LossScaler(1)], "zero_stage": stage, "param_slice_mappings": [place]}}
torch.save(saved, sys.argv[1])
assert torch.load(sys.argv[1], weights_only=False)["param_slice_mappings"] == [place]
try:
    torch.load(sys.argv[1], weights_only=True)
    raise AssertionError("classes that nobody has named as safe")
except pickle.UnpicklingError:
    pass
torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])
found = torch.load(sys.argv[1], weights_only=True)
assert found["loss_scaler"][0].loss_scale == 512 and found["zero_stage"] is stage
print("read")
"""


def test_what_a_checkpoint_of_deepspeed_holds_pickled_is_read_at_its_paths_and_may_be_named_as_safe(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _READ.format(site=SITE), str(tmp_path / "states.pt")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read\n"
