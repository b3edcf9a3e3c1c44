"""An index comes back from its bytes; whatever else is in its place is an error that names where, and nothing worse."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsrun.checkpoint_files.index.value import INDEX_FILE, Index, is_summed_right, with_sum
from dsrun.checkpoint_files.parse import parse_index, read_index
from dsrun.errors import CheckpointError
from support.checkpoints import FILES, write_first_format, write_two_files

FOLDER = Path("tag")


def written(index: Index, change: Callable[[Any], None] | None = None) -> bytes:
    """The bytes of an index after a change of its members, with a checksum that fits."""
    text = index.to_bytes()
    if change is None:
        return text
    body = json.loads(text)
    change(body)
    members = {key: value for key, value in body.items() if key not in ("format", "xxh3")}
    return with_sum(b'{"format": 2, "xxh3": "0000000000000000",' + json.dumps(members).encode()[1:])


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return write_two_files(tmp_path / "tag")


def test_an_index_comes_back(tmp_path: Path, index: Index) -> None:
    assert read_index(tmp_path / "tag") == index
    assert index.state_roles() == set()
    assert index.find("tied", "param") is index.tensors["w", "param"]
    assert index.find("tied", "exp_avg") is None


def test_format_1_is_still_read(tmp_path: Path, index: Index) -> None:
    write_first_format(tmp_path / "old")
    old = read_index(tmp_path / "old")
    assert old.format == 1
    assert old.tensors == {key: value for key, value in index.tensors.items() if key[0] != "none"}
    assert old.files[FILES[0]].nbytes == index.files[FILES[0]].nbytes
    assert old.files[FILES[0]].sums is None


def test_every_flipped_bit_is_found(index: Index) -> None:
    text = index.to_bytes()
    assert is_summed_right(text)
    for bit in range(0, 8 * len(text), 3):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            parse_index(bytes(flipped), FOLDER)


def test_what_is_missing_or_of_another_version_is_named(tmp_path: Path, index: Index) -> None:
    with pytest.raises(CheckpointError, match=r"index.json is missing; complete tags here: tag"):
        read_index(tmp_path / "other")
    future = written(index).replace(b'"format": 2', b'"format": 3')
    with pytest.raises(CheckpointError, match="checkpoint format is 3; this version reads formats 1 and 2"):
        parse_index(future, FOLDER)


def set_to(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return change


W = ("tensors", "w", "param")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_to("world_size", to=0), "`world_size` is 0"),
        (set_to("world_size", to=True), "`world_size` is True"),
        (set_to("block_bytes", to=1), "expected 16777216"),
        (set_to("ranks", to=[{}]), "`ranks` has 1 entries for 2 ranks"),
        (set_to("ranks", to=[1, 2]), r"`ranks`\[0\] is 1"),
        (set_to("values", to=[]), "`values` is a list"),
        (set_to("tensors", to=3), "`tensors` is 3; expected an object"),
        (set_to(*W, "dtype", to="F33"), "dtype of 'param' of 'w' is 'F33'"),
        (set_to(*W, "dtype", to="F64"), "for 4 elements of 8 bytes"),
        (set_to(*W, "shape", to=[3, 4.0]), "is 4.0"),
        (set_to(*W, "shape", to=[1 << 40, 1 << 40]), "which no tensor has"),
        (set_to(*W, "shape", to=[1] * 65), "which no tensor has"),
        (set_to(*W, "shape", to=[12]), "2 offsets and 2 sizes for 1 dims"),
        (set_to(*W, "boxes", to=[]), "the boxes have 0 elements together, and the tensor has 12"),
        (set_to(*W, "boxes", 0, "offset", to=[1, 0]), "overlap"),
        (set_to(*W, "boxes", 1, "offset", to=[2, 0]), "leaves a tensor of"),
        (set_to(*W, "boxes", 1, "offset", to=[-1, 0]), "is -1"),
        (set_to(*W, "boxes", 0, "file", to="../x"), "which `files` does not list"),
        (set_to(*W, "boxes", 0, "bytes", to=[0]), r"bytes of box 0 of 'param' of 'w' are \(0,\)"),
        (set_to(*W, "boxes", 0, "bytes", to=[1 << 50, (1 << 50) + 16]), "ends at byte"),
        (set_to("tensors", "s", "buffer", "boxes", 0, "bytes", to=[190, 194]), "share bytes of"),
        (set_to("files", "../x", to={"bytes": 0, "xxh3": []}), "is no plain file name"),
        (set_to("files", FILES[0], "bytes", to=-1), "is -1"),
        (set_to("files", FILES[0], "bytes", to=1 << 80), "out of all bounds"),
        (set_to("files", FILES[0], "xxh3", to=[]), "has 0 checksums for"),
        (set_to("files", FILES[0], "xxh3", to=["zz"]), "expected 16 hexadecimal digits"),
        (set_to("aliases", to={"w": "s"}), "`aliases` 'w' is 's'"),
        (set_to("aliases", to={"tied": "gone"}), "`aliases` 'tied' is 'gone'"),
        (lambda body: body.pop("files"), "it has no `files`"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(index: Index, change: Callable[[Any], None], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        parse_index(written(index, change), FOLDER)
    assert "tag/index.json: the index is damaged: " in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"\0", b"[]", b"{}", b'{"format": 1}', b'{"format": true}', b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe",
     b'{"format": 2, "format": 2}', b'{"format": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_what_is_no_index_is_an_error_of_ours(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_index(text, FOLDER)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("file", "../../etc/passwd"), "which is no plain file name"),
        (("file", "gone"), "gone: cannot be read"),
        (("key", "s:buffer"), "holds no 'F32' of shape"),
        (("offset", [1, 0]), "overlap"),
    ],
)
def test_format_1_is_read_as_strictly(tmp_path: Path, change: tuple[str, Any], said: str) -> None:
    write_first_format(tmp_path / "old")
    path = tmp_path / "old" / INDEX_FILE
    body = json.loads(path.read_bytes())
    body["tensors"]["w"]["param"]["boxes"][0][change[0]] = change[1]
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=said):
        read_index(tmp_path / "old")


def test_links_are_not_followed(tmp_path: Path, index: Index) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / INDEX_FILE).symlink_to(tmp_path / "tag" / INDEX_FILE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_index(tmp_path / "other")


NUMBERS = {
    ("counters", "micro_steps"): 0, ("counters", "global_steps"): 0, ("counters", "global_samples"): 0,
    ("counters", "skipped_steps"): 0, ("data", "epoch"): 0, ("data", "samples_seen"): 0,
    ("loss_scale", "hysteresis"): 0, ("loss_scale", "steps"): 0, ("loss_scale", "last_overflow"): -1,
    ("mesh", "tensor"): 1,
}  # fmt: skip
NO_NUMBERS = ["3", 3.0, True, None, [3], float("nan"), float("inf"), 1 << 63]


@pytest.mark.parametrize("place", NUMBERS)
@pytest.mark.parametrize("value", [*NO_NUMBERS, "below"])
def test_a_counter_that_none_can_be_gone_on_from_is_named(index: Index, place: tuple[str, str], value: Any) -> None:
    least = NUMBERS[place]
    value = least - 1 if value == "below" else value
    parse_index(written(index, set_to("values", place[0], to={place[1]: least})), FOLDER)
    with pytest.raises(
        CheckpointError, match=f"damaged: `values.{'.'.join(place)}` is .*expected a whole number of {least}"
    ):
        parse_index(written(index, set_to("values", place[0], to={place[1]: value})), FOLDER)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("counters", None, "`values.counters` is None; expected an object"),
        ("data", [], "`values.data` is a list; expected an object"),
        ("data", {"seed": "7"}, "`values.data.seed` is '7'; expected a whole number"),
        ("loss_scale", {"scale": float("nan")}, "`values.loss_scale.scale` is nan; expected a finite number above 0"),
        ("loss_scale", {"scale": -2.0}, "is -2.0; expected a finite number above 0"),
        ("loss_scale", {"scale": "2"}, "is '2'; expected a finite number above 0"),
        ("optimizer", {"type": 3}, "`values.optimizer.type` is 3; expected a text"),
        ("optimizer", {"groups": [1]}, r"`values.optimizer.groups`\[0\] is 1; expected an object"),
        ("optimizer", {"left_out": [{"missed": -1}]}, r"`missed` of `values.optimizer.left_out`\[0\] is -1"),
        ("scheduler", {"type": 3}, "`values.scheduler.type` is 3; expected a text"),
        ("frozen", "no", "`values.frozen` is 'no'; expected true or false"),
        ("latest", 0, "`values.latest` is 0; expected a whole number of 1 or more"),
        ("latest", True, "`values.latest` is True"),
    ],
)
def test_a_value_that_none_can_be_gone_on_from_is_named(index: Index, place: str, value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse_index(written(index, set_to("values", place, to=value)), FOLDER)


def test_what_a_run_may_not_have_is_no_damage(index: Index) -> None:
    nothing = {"counters": {}, "data": None, "loss_scale": None, "scheduler": None, "frozen": False, "latest": 1}
    assert parse_index(written(index, set_to("values", to=nothing)), FOLDER).values == nothing
    assert parse_index(written(index, set_to("values", to={})), FOLDER).values == {}


# Fuzz -----------------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*path, key), *_places(inner, (*path, key))]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_an_index_is_read_as_it_is_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tag = tmp_path_factory.getbasetemp() / "fuzzed-index"
    good = write_two_files(tag) if not tag.exists() else read_index(tag)
    body = json.loads(good.to_bytes())
    mutated = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(_places(mutated)))
        target = mutated
        for key in place[:-1]:
            target = target[key]
        if isinstance(target, dict) and data.draw(st.booleans()):
            del target[place[-1]]
        else:
            target[place[-1]] = data.draw(_JSON | st.sampled_from([target[place[-1]], FILES[0], [0, 16], [1, 4]]))
        if not _places(mutated):
            break
    members = {key: value for key, value in mutated.items() if key not in ("format", "xxh3")}
    text = with_sum(b'{"format": 2, "xxh3": "0000000000000000",' + json.dumps(members).encode()[1:])
    try:
        read = parse_index(text, tag)
    except CheckpointError:
        return
    for key, stored in read.tensors.items():
        for box in stored.boxes:
            assert 0 <= box.first <= box.last <= read.files[box.file].nbytes, key
    assert parse_index(read.to_bytes(), tag) == read or "nan" in repr(read.values) + repr(read.ranks)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
@example(b'{"format": 2, "xxh3": "')
def test_any_bytes_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_index(text, FOLDER)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_any_splice_of_an_indexs_bytes_is_read_as_it_is_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, summed: bool
) -> None:
    tag = tmp_path_factory.getbasetemp() / "spliced-index"
    good = (write_two_files(tag) if not tag.exists() else read_index(tag)).to_bytes()
    first = data.draw(st.integers(0, len(good)))
    last = data.draw(st.integers(first, min(len(good), first + 20)))
    other = data.draw(st.binary(max_size=8) | st.sampled_from([b"[", b"}", b"-", b"e9", b"null", b'"', good[40:60]]))
    text = good[:first] + other + good[last:]
    try:
        read = parse_index(with_sum(text) if summed else text, tag)
    except CheckpointError:
        return
    assert parse_index(read.to_bytes(), tag) == read or "nan" in repr(read.values) + repr(read.ranks)
    assert summed or text == good, "without a new sum nothing else is taken"
