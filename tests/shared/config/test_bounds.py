"""Hostile input: an error in bounded time and memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dsrun.config.load import load
from dsrun.errors import ConfigError
from support.core_speed import core_seconds


def refusal(source: Any) -> str:
    """Returns what is said, after checking that saying it took under 2 s of a core and 100 MiB."""

    def refuse() -> None:
        with pytest.raises(ConfigError):
            load(source)

    assert core_seconds(refuse, tries=1) < 2
    tracemalloc.start()  # slows everything down, so this is a second run
    with pytest.raises(ConfigError) as caught:
        load(source)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 << 20
    return caught.value.render()


@pytest.mark.depends_on_speed("2 s of a core")
@pytest.mark.parametrize(("name", "limit"), [("big.json", "1.0 MiB"), ("big.yaml", "64.0 KiB")])
def test_a_file_of_100_mb_is_refused_by_its_size(name: str, limit: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(100 << 20)
    assert refusal(path) == f"error: {path}: has 100.0 MiB; a config has at most {limit}"


@pytest.mark.depends_on_speed("2 s of a core")
def test_text_of_100_mb_is_refused_by_its_size() -> None:
    text = '{"a": "' + "x" * (100 << 20) + '"}'
    assert refusal(text) == "error: <inline>: has 100.0 MiB; a config has at most 1.0 MiB"


@pytest.mark.depends_on_speed("2 s of a core")
def test_a_named_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    assert refusal(path) == (
        f"error: {path} is a named pipe; expected a config file\nhint: `/dev/stdin` and `<(command)` work"
    )


def test_a_device_is_refused_before_it_is_opened() -> None:
    assert refusal(Path("/dev/zero")) == (
        "error: /dev/zero is a device; expected a config file\nhint: `/dev/stdin` and `<(command)` work"
    )


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"train_batch_size": 8}')
    os.close(writing)
    try:
        assert load(f"/dev/fd/{reading}").train_batch_size == 8
    finally:
        os.close(reading)


@pytest.mark.depends_on_speed("2 s of a core")
@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("deep.json", "[" * 10_000, 66),
        ("deep_objects.json", '{"a":' * 10_000, 326),
        ("deep.yaml", "[" * 10_000, 66),
        ("deep_blocks.yaml", "- " * 10_000, 131),
    ],
)
def test_ten_thousand_levels_are_refused(name: str, text: str, column: int, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert refusal(path) == f"error: {path}:1:{column}: nested more than 64 deep; no config key is"


@pytest.mark.depends_on_speed("2 s of a core")
def test_an_endless_dict_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["bf16"] = endless
    assert refusal(endless) == "error: <dict>: nested more than 64 deep; no config key is"


@pytest.mark.depends_on_speed("2 s of a core")
def test_half_a_million_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text('{"a": [' + "0," * 500_000 + "0]}")
    assert refusal(path).endswith("more than 100,000 values; no config has that many")


@pytest.mark.depends_on_speed("2 s of a core")
def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "laughs.yaml"
    names = "abcdefghij"
    lines = [f"a: &a [{','.join('x' * 9)}]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in pairwise(names)]
    path.write_text("\n".join(lines))
    assert refusal(path).endswith("more than 100,000 values; no config has that many")


@pytest.mark.depends_on_speed("2 s of a core")
def test_thousands_of_unknown_keys_are_all_said(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"bf16": {}, ' + ", ".join(f'"key_{i}": 0' for i in range(3_000)) + "}")
    assert refusal(path).count("is not a key of the config") == 3_000


@pytest.mark.depends_on_speed("2 s of a core")
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gradient_predivide_factor", 1e300, "a number of at least 1e-37 and at most 1e+37"),
        ("gradient_predivide_factor", 1e-300, "a number of at least 1e-37 and at most 1e+37"),
        ("train_batch_size", 10**20, "a whole number of at least 1, up to 9223372036854775807"),
        ("train_batch_size", -(10**20), "a whole number of at least 1"),
    ],
)
def test_a_number_that_nothing_can_hold_is_refused_with_the_bound(
    tmp_path: Path, key: str, value: float, expected: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, key: value}))
    text = refusal(path)
    assert f"`{key}` is " in text
    assert f"; expected {expected}\n" in text + "\n"
