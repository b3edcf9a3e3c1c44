"""Configs as DeepSpeed reads them, by the library hjson: read alike, or refused with the place; never read otherwise.

The values were recorded from hjson 3.1.0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.text.json_parser import parse_json
from dsrun.config.text.source import read_source
from dsrun.errors import ConfigError

ALIKE: tuple[tuple[str, Any], ...] = (
    (
        '{"a": 1, "b": [1, 2.5, -3e5], "c": {"d": null, "e": true}}',
        {"a": 1, "b": [1, 2.5, -300000], "c": {"d": None, "e": True}},
    ),
    ('{"a": 1, // one\n"b": 2}', {"a": 1, "b": 2}),
    ('{"a": 1, # one\n"b": 2}', {"a": 1, "b": 2}),
    ('{"a": /* x */ 1, /* y\n z */ "b": 2}', {"a": 1, "b": 2}),
    ('{"a": 1,}', {"a": 1}),
    ('{"a": [1, 2,],}', {"a": [1, 2]}),
    ("{a: 1, b_c: 2, train-x: 3}", {"a": 1, "b_c": 2, "train-x": 3}),
    ('{"a": 1\n"b": 2}', {"a": 1, "b": 2}),
    ('{"a": [1\n2\n3]}', {"a": [1, 2, 3]}),
    ("a: 1\nb: 2\n", {"a": 1, "b": 2}),
    ('"a": 1,\n"b": {"c": 2}\n', {"a": 1, "b": {"c": 2}}),
    ("{\n  type: AdamW\n  lr: 1e-3\n}", {"type": "AdamW", "lr": 0.001}),
    ("{\n  nvme_path: /local_nvme\n  b: 1\n}", {"nvme_path": "/local_nvme", "b": 1}),
    ("{\n  name: two words here  \n}", {"name": "two words here"}),
    ("{\n  a: true,\n  b: false\n c: null\n}", {"a": True, "b": False, "c": None}),
    ("{\n  lr: auto\n  b: 2\n}", {"lr": "auto", "b": 2}),
    ("{'a': 'b'}", {"a": "b"}),
    ("{'a': 'say \"x\"'}", {"a": 'say "x"'}),
    ('{"a": "x\\ty\\u00e9\\n"}', {"a": "x\tyé\n"}),
    ('{"a": 5e8}', {"a": 500000000}),
    ('{"a": 1e-4, "b": 1E3}', {"a": 0.0001, "b": 1000}),
    ('{"a": -0}', {"a": 0}),
    ("{}", {}),
    ('{\r\n"a": 1,\r\n"b": 2\r\n}\r\n', {"a": 1, "b": 2}),
    (
        "{\n  offload_optimizer: {\n    device: cpu\n    pin_memory: true\n  }\n}",
        {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    ),
    ('{"a": 1} // x', {"a": 1}),
    ('{"": 1}', {"": 1}),
    ("[1, 2]", [1, 2]),
    ("3", 3),
    ("{\n names: [\n   Linear\n   Conv\n ]\n}", {"names": ["Linear", "Conv"]}),
    ("{\n  a:\n    1\n}", {"a": 1}),
    ('{\n\t"a": 1,\n\t"b": "x"\n}', {"a": 1, "b": "x"}),
    ('{"a": "x # y"}', {"a": "x # y"}),
)

#: Text, the value that hjson makes of it, and the line and column at which it is refused here.
REFUSED: tuple[tuple[str, Any, str], ...] = (
    ('{\n  "type": AdamW,\n  "lr": 1e-3\n}', {"type": "AdamW,", "lr": 0.001}, "2:11"),
    ("{\n  type: AdamW # the optimizer\n  lr: 1e-3\n}", {"type": "AdamW # the optimizer", "lr": 0.001}, "2:9"),
    ("{\n  url: s3://bucket/x // here\n  b: 1\n}", {"url": "s3://bucket/x // here", "b": 1}, "2:8"),
    ('{\n  "a": True,\n  "b": 1\n}', {"a": "True,", "b": 1}, "2:8"),
    ('{\n  "a": True\n  "b": 1\n}', {"a": "True", "b": 1}, "2:8"),
    ("{\n  a: '''\n     first\n     second\n     '''\n  b: 1\n}", {"a": "first\nsecond", "b": 1}, "2:6"),
    ("{\n  a: '''x y'''\n}", {"a": "x y"}, "2:6"),
    ('{"a": 1, "a": 2}', {"a": 2}, "1:10"),
    ("{\n  a: 5 # five\n  b: 1_000\n}", {"a": 5, "b": "1_000"}, "3:6"),
    ("", {}, ""),
    ("# nothing\n", {}, ""),
    ("{\n a: b: c\n}", {"a": "b: c"}, "2:5"),
    ("{\n p: C:\\tmp\n}", {"p": "C:\\tmp"}, "2:5"),
    ('{\n p: say "hi"\n}', {"p": 'say "hi"'}, "2:5"),
)

#: Refused by hjson too.
WRONG = (
    '{"a": 1 "b": 2}',
    "{type: AdamW}",
    '{"a": True}',
    '{"a": +1}',
    '{"a": 0x10}',
    "{\n  zero_optimization: {\n    stage: 3\n    offload_optimizer: { device: cpu, pin_memory: true }\n  }\n}",
    '{"a": 1} x',
    '{"a": "x\ny"}',
    "{\n names: [Linear, Conv]\n}",
    '{"a": 1',
    '{"a": 1 /* x',
    '{"a": 1; "b": 2}',
    '{"a" = 1}',
    '{"a": 1,, "b": 2}',
    '{, "a": 1}',
)


@pytest.mark.parametrize(("text", "value"), ALIKE)
def test_a_text_that_means_one_thing_is_read_as_hjson_reads_it(text: str, value: Any) -> None:
    assert parse_json(text, "ds.json").plain() == value


@pytest.mark.parametrize(("text", "value", "place"), REFUSED)
def test_a_text_that_hjson_reads_as_few_mean_it_is_refused_with_its_place(text: str, value: Any, place: str) -> None:
    del value  # which nobody is to get in silence
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "ds.json")
    assert str(caught.value).startswith(f"ds.json:{place}:" if place else "ds.json: ")


@pytest.mark.parametrize("text", WRONG)
def test_what_hjson_refuses_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^ds\.json:\d+:\d+: "):
        parse_json(text, "ds.json")


def test_numbers_of_python_and_json_are_numbers_though_hjson_makes_texts_of_them() -> None:
    text = '{\n"a": Infinity,\n"b": .5,\n"c": 1.,\n"d": 007,\n"e": NaN\n}'
    plain = parse_json(text, "ds.json").plain()
    assert math.isnan(plain.pop("e"))
    assert plain == {"a": math.inf, "b": 0.5, "c": 1.0, "d": 7}


def test_a_file_of_any_ending_may_be_hjson(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text(
        "# small\ntrain_micro_batch_size_per_gpu: 2\nzero_optimization: {\n  stage: 3\n}\n", encoding="utf-8"
    )
    node, _ = read_source(path)
    assert node.plain() == {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
