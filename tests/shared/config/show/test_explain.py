"""What `dsrun config explain` says."""

from __future__ import annotations

import pytest

from dsrun.config.knob import Status
from dsrun.config.show.explain import explain, find, overview
from dsrun.config.show.keys import all_keys
from dsrun.errors import ConfigError


def test_a_key_is_explained_with_unit_default_effect_status_and_users() -> None:
    (key,) = find("stage3_param_persistence_threshold")
    assert explain(key) == (
        "zero_optimization.stage3_param_persistence_threshold\n"
        "  The trained or the frozen parameters of a unit stay gathered if they are no more than this together.\n"
        "\n"
        '  value      a whole number of at least 0 or "auto"\n'
        "  default    0 (DeepSpeed: 100,000, of each parameter by itself)\n"
        "  unit       elements\n"
        "  effect     trained ones are gathered once a step, frozen ones are not cut: fewer calls, more memory\n"
        '  auto       "auto" is computed from the model\'s hidden size\n'
        "  acts at    ZeRO stage 3\n"
        "  status     works\n"
        "  also read  `param_persistence_threshold`\n"
        "  set by     96 of 343 surveyed configs, from 33 of 45 repositories"
    )


def test_every_key_can_be_explained_by_its_path() -> None:
    for path in dict.fromkeys(key.path for key in all_keys()):
        assert all(explain(key).startswith(path) for key in find(path))


def test_no_section_is_called_planned_that_has_a_key_that_works() -> None:
    for key in all_keys():
        if key.inner is not None and key.status is Status.PLANNED:
            assert [name for name in key.inner.model_fields if key.inner.status_of(name) is Status.WORKS] == [], (
                key.path
            )


def test_a_path_shared_by_types_is_explained_for_each_that_is_built() -> None:
    types = [key.types for key in find("optimizer.params.lr")]
    assert types[:2] == [
        ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "MuAdam", "MuAdamW"),
        ("SGD", "MuSGD"),
    ]
    assert ("Lamb", "FusedLamb") in types


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("stge", "`stge` is not a key of the config", "did you mean `stage`?"),
        (
            "device",
            "`device` is the end of 2 keys: `zero_optimization.offload_optimizer.device`, "
            "`zero_optimization.offload_param.device`",
            "give the whole path",
        ),
        ("elasticity", "`elasticity` is gone: drop it; a checkpoint loads on any number of ranks", None),
        ("bf16.loss_scale", "`bf16.loss_scale` does nothing: bf16 has the range of fp32 and needs no loss scale", None),
    ],
)
def test_what_is_no_key_is_refused_with_a_way_out(name: str, message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_the_overview_names_every_section() -> None:
    assert {"zero_optimization", "bf16", "train_batch_size"} <= {line.split()[0] for line in overview().splitlines()}


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("dynamic_loss_scale", "fp16.initial_scale_power"),
        ("fp16.dynamic_loss_scale.delayed_shift", "fp16.hysteresis"),
    ],
)
def test_the_old_block_of_the_loss_scale_is_explained_by_keys_of_fp16(key: str, new: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(key)
    assert error.value.render() == (
        f"error: `{key}` is an old form of keys of `fp16`\nhint: see `dsrun config explain {new}`"
    )


@pytest.mark.parametrize("key", ["cpu_offload", "zero_optimization.cpu_offload"])
def test_an_old_flag_is_explained_by_the_key_it_became(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(key)
    assert error.value.render() == (
        f"error: `{key}` is an old form of `zero_optimization.offload_optimizer.device`\n"
        "hint: see `dsrun config explain zero_optimization.offload_optimizer.device`"
    )
