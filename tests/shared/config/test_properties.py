"""Whatever is thrown at it: a config or a ConfigError, and what is shown loads as the same values."""

from __future__ import annotations

import json
from typing import Any, cast

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dsrun.config.knob import Section
from dsrun.config.load import load
from dsrun.config.show.keys import Key, all_keys
from dsrun.config.show.migrate import migrate
from dsrun.config.show.resolved import document
from dsrun.config.text.yaml_parser import parse_yaml
from dsrun.errors import ConfigError

QUICK = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
#: For whole configs, which take longer each.
FEWER = settings(QUICK, max_examples=80)

KEYS = [key for key in all_keys() if not key.types]
PARAMS = [key for key in all_keys() if key.types]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 8),
    st.floats(),
    st.floats(0, 1),
    st.text(max_size=8),
    st.sampled_from(["auto", "cpu", "none", "5e8", "1e-4", "AdamW", "WarmupLR", "WarmupDecayLR", "SGD", "true"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def configs(draw: st.DrawFn, keys: list[Key] = KEYS) -> dict[str, Any]:
    """Configs of known keys with likely and unlikely values, and a few unknown keys."""
    config: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(keys), max_size=8)):
        *sections, name = key.path.split(".")
        place = config
        for section in sections:
            inner: Any = place.setdefault(section, {})
            if not isinstance(inner, dict):
                break
            place = cast("dict[str, Any]", inner)
        else:
            place[name] = draw(values | st.just(key.default))
    if draw(st.booleans()):
        config[draw(st.text(max_size=8))] = draw(values)
    return config


@QUICK
@given(st.text(max_size=200))
@example('{"a": 1}{')
@example("{'\\u0000': 1}")
def test_any_text_is_a_config_or_a_config_error(text: str) -> None:
    assume(not text.startswith("/dev/"))  # drawn from what the code names; the kernel's log is read for ever
    for source in (text, "{" + text, '{"bf16": ' + text + "}"):
        try:
            load(source)
        except ConfigError as error:
            error.render().encode()


@QUICK
@given(st.text(max_size=200))
def test_any_yaml_is_a_tree_or_a_config_error(text: str) -> None:
    try:
        parse_yaml(text, "x.yaml")
    except ConfigError as error:
        error.render()


@FEWER
@given(configs([*KEYS, *PARAMS]), st.integers(1, 64))
def test_any_config_is_loaded_or_refused_and_shown_as_itself(config: dict[str, Any], world_size: int) -> None:
    try:
        loaded = load(config, world_size=world_size)
    except ConfigError as error:
        error.render().encode()
        return
    shown = document(loaded)
    again = load(json.loads(json.dumps(shown)), world_size=world_size)
    assert document(again) == shown
    assert values_of(again) == values_of(loaded)


@FEWER
@given(configs([*KEYS, *PARAMS]))
def test_any_config_can_be_migrated_and_a_second_time_changes_nothing(config: dict[str, Any]) -> None:
    try:
        once = migrate(config)
    except ConfigError:
        return
    document_once = json.loads(once.text)
    again = migrate(document_once)
    assert again.changes == ()
    assert json.loads(again.text) == document_once


def values_of(section: Section) -> dict[str, Any]:
    """All values of a config; batch values that were solved count as given."""
    return {
        key: value for key, value in section.model_dump().items() if "batch" not in key and "accumulation" not in key
    }


def test_every_default_is_a_valid_value() -> None:
    for section in {key.section for key in all_keys()}:
        given_values = {
            name: info.get_default(call_default_factory=True)
            for name, info in section.model_fields.items()
            if not info.is_required()
        }
        required = {name for name, info in section.model_fields.items() if info.is_required()}
        if not required:
            section.model_validate(given_values)
