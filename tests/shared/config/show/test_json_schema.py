"""The JSON Schema that editors get."""

from __future__ import annotations

import json
from typing import Any

from dsrun.config.show.json_schema import json_schema


def test_values_have_type_bounds_default_and_meaning() -> None:
    properties = json_schema()["properties"]
    assert properties["gradient_clipping"] == {
        "anyOf": [{"minimum": 0, "type": "number"}, {"const": "auto"}],
        "default": 1.0,
        "description": "Scale gradients down where their norm over all parameters exceeds this; 0 never does. "
        "Unit: L2 norm.",
    }
    assert properties["zero_optimization"]["properties"]["stage"]["enum"] == [0, 1, 2, 3]


def test_unknown_keys_are_refused_and_comments_are_not() -> None:
    for schema in (json_schema(), json_schema()["properties"]["zero_optimization"]):
        assert schema["additionalProperties"] is False
        assert list(schema["patternProperties"]) == ["^(_|//)"]


def test_params_follow_the_type() -> None:
    rules = json_schema()["properties"]["optimizer"]["allOf"]
    by_type = {kind: rule for rule in rules for kind in rule["if"]["properties"]["type"]["enum"]}
    assert "nesterov" in by_type["SGD"]["then"]["properties"]["params"]["properties"]
    assert "nesterov" not in by_type["AdamW"]["then"]["properties"]["params"]["properties"]


def test_the_words_are_those_of_json_schema() -> None:
    def words(schema: Any) -> set[str]:
        if isinstance(schema, list):
            return {word for item in schema for word in words(item)}
        if not isinstance(schema, dict):
            return set()
        return {*schema, *(word for value in schema.values() for word in words(value))}

    assert not words(json_schema()) & {"ge", "gt", "le", "lt", "title_"}
    assert json.loads(json.dumps(json_schema())) == json_schema()
