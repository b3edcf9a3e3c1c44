"""The `checkpoint` verb: what it prints where, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest

from dsrun.checkpoint_files.index.value import INDEX_FILE
from support.checkpoints import FILES, ROWS, write_first_format, write_two_files
from support.cli import invoke
from support.odd_files import KINDS, put_in_place

TIMES = {"old": 1000, "torn": 1500, "new": 2000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tags: `old` and `new` are whole, `torn` has no index; `latest` names `new`; and a stranger's folder."""
    folder = tmp_path / "checkpoints"
    for name, moment in TIMES.items():
        write_two_files(folder / name)
        if name == "torn":
            (folder / name / INDEX_FILE).unlink()
        for path in (folder / name).iterdir():
            os.utime(path, (moment, moment))
    (folder / "latest").write_text("new")
    (folder / "notes").mkdir()
    (folder / "notes" / "index.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "rm", "export", "import", "diff"])
def test_every_verb_has_help(verb: str) -> None:
    result = invoke("checkpoint", verb, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: dsrun checkpoint {verb}")


def test_ls_tells_what_is_whole_what_is_torn_and_which_is_the_latest(folder: Path) -> None:
    result = invoke("checkpoint", "ls", str(folder))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["TAG", "STEP", "SIZE", "AGE", "STATE"]
    assert [(line[0], line[1], *line[5:]) for line in lines[1:]] == [
        ("old", "3", "complete"),
        ("torn", "-", "torn"),
        ("new", "3", "complete,", "latest"),
    ]
    assert result.stderr.startswith("dsrun: torn: torn: index.json is missing")


def test_ls_tells_programs_the_same(folder: Path) -> None:
    (folder / "old" / FILES[1]).write_bytes(b"short")
    body = json.loads(invoke("checkpoint", "ls", "--json", str(folder)).stdout)
    assert (body["schema_version"], body["latest"]) == (1, "new")
    assert [(tag["tag"], tag["state"], tag["step"], tag["latest"]) for tag in body["tags"]] == [
        ("old", "damaged", 3, False),
        ("torn", "torn", None, False),
        ("new", "complete", 3, True),
    ]
    assert "it had " in body["tags"][0]["reason"]
    assert FILES[1] in body["tags"][0]["reason"]


def test_ls_says_when_latest_leads_nowhere_and_when_there_is_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "latest").write_text("gone")
    assert "`latest` names 'gone', which is not there" in invoke("checkpoint", "ls", str(folder)).stderr
    assert invoke("checkpoint", "ls", str(folder / "notes")).stderr.startswith("dsrun: no checkpoints in")
    missing = invoke("checkpoint", "ls", str(tmp_path / "none"))
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "no such file or directory" in missing.stderr


def test_show_tells_of_the_latest_or_of_the_one_that_is_named(folder: Path) -> None:
    for path in (folder, folder / "new"):
        result = invoke("checkpoint", "show", str(path))
        assert (result.exit_code, result.stderr) == (0, "")
        words = [line.split() for line in result.stdout.splitlines()]
        assert ["step", "3"] in words
        assert ["ranks", "2"] in words
        assert ["tied", "tied", "=", "w"] in words
        assert ["param", "F32", "1", "12", "48", "B"] in words


def test_show_tells_programs_everything_but_the_boxes(folder: Path) -> None:
    body = json.loads(invoke("checkpoint", "show", "--json", str(folder / "old")).stdout)
    assert body["world_size"] == 2
    assert body["aliases"] == {"tied": "w"}
    assert {"name": "w", "role": "param", "dtype": "F32", "shape": [3, 4]} in body["tensors"]
    assert {"role": "param", "dtype": "F32", "tensors": 1, "elements": 12, "bytes": 48} in body["shares"]


def test_show_prints_a_config_that_diff_can_compare(folder: Path) -> None:
    index = write_two_files(folder / "with_config")
    index.values["config"] = {"b": 1, "a": {"stage": 2}}
    (folder / "with_config" / INDEX_FILE).write_bytes(index.to_bytes())
    printed = invoke("checkpoint", "show", "--config", str(folder / "with_config")).stdout
    assert printed == '{\n  "a": {\n    "stage": 2\n  },\n  "b": 1\n}\n'


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_what_is_no_checkpoint_is_said_so(folder: Path, verb: str) -> None:
    for path, expected in (
        (folder / "notes", "there is no checkpoint here"),
        (folder / "none", "no such folder; complete tags here: old, new"),
    ):
        result = invoke("checkpoint", verb, str(path))
        assert (result.exit_code, result.stdout) == (1, "")
        assert expected in result.stderr
    torn = invoke("checkpoint", verb, str(folder / "torn"))
    assert torn.exit_code == 1
    assert "no complete checkpoint: index.json is missing" in torn.stderr


def test_verify_finds_every_flipped_bit_and_names_file_and_tensor(folder: Path) -> None:
    assert invoke("checkpoint", "verify", str(folder)).stdout == f"{folder / 'new'}: ok\n"
    for name in (*FILES, INDEX_FILE):
        path = folder / "new" / name
        whole = path.read_bytes()
        for byte in range(0, len(whole), 29):
            path.write_bytes(whole[:byte] + bytes([whole[byte] ^ (1 << byte % 8)]) + whole[byte + 1 :])
            result = invoke("checkpoint", "verify", str(folder / "new"))
            assert (result.exit_code, result.stdout) == (1, ""), f"bit of byte {byte} of {name}"
            assert str(path) in result.stderr
            assert name == INDEX_FILE or "of `w`" in result.stderr
        path.write_bytes(whole)
    assert invoke("checkpoint", "verify", str(folder / "new")).exit_code == 0


def test_verify_goes_through_all_and_says_everything_that_is_wrong(folder: Path) -> None:
    (folder / "new" / FILES[0]).unlink()
    (folder / "new" / FILES[1]).write_bytes(b"x")
    result = invoke("checkpoint", "verify", "--all", str(folder))
    assert (result.exit_code, result.stdout) == (1, f"{folder / 'old'}: ok\n")
    for expected in (f"{FILES[0]}: cannot be read", f"{FILES[1]}: cannot be read: it has 1 bytes", "torn"):
        assert expected in result.stderr
    body = json.loads(invoke("checkpoint", "verify", "--all", "--json", str(folder)).stdout)
    assert [entry["ok"] for entry in body["checkpoints"]] == [True, False, False]
    assert len(body["checkpoints"][2]["problems"]) == 2


def test_verify_reads_checkpoints_of_format_1(tmp_path: Path) -> None:
    write_first_format(tmp_path / "old")
    assert invoke("checkpoint", "verify", str(tmp_path / "old")).exit_code == 0


def test_rm_removes_and_latest_names_the_newest_that_is_left(folder: Path) -> None:
    dry = invoke("checkpoint", "rm", "--dry-run", str(folder / "new"))
    assert (dry.exit_code, dry.stdout) == (0, f"{folder / 'new'}\n")
    assert (folder / "new" / INDEX_FILE).exists()
    result = invoke("checkpoint", "rm", str(folder / "new"), str(folder / "torn"))
    assert (result.exit_code, result.stdout) == (0, f"{folder / 'new'}\n{folder / 'torn'}\n")
    assert "`latest` names old now" in result.stderr
    assert (folder / "latest").read_text() == "old"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "notes", "old"]
    last = invoke("checkpoint", "rm", str(folder / "old"))
    assert "no complete checkpoint is left" in last.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["notes"]


def test_rm_removes_nothing_where_one_path_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(folder / "old")
    for path, expected in ((folder / "notes", "no checkpoint of dsrun"), (folder / "link", "it is a link to")):
        result = invoke("checkpoint", "rm", str(folder / "new"), str(path))
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"{path}: " in result.stderr
        assert expected in result.stderr
    assert {path.name for path in folder.iterdir()} == {"old", "torn", "new", "notes", "latest", "link"}


def test_rm_follows_no_link_inside_a_tag_and_leaves_strangers_files(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.safetensors"
    precious.write_text("mine")
    (folder / "old" / "rank-00007-0b0b0b0b.safetensors").symlink_to(precious)
    (folder / "old" / "mine.txt").write_text("mine")
    result = invoke("checkpoint", "rm", str(folder / "old"))
    assert result.exit_code == 1
    assert "files are left that are not its own" in result.stderr
    assert "mine.txt" in result.stderr
    assert precious.read_text() == "mine"
    assert not (folder / "old" / INDEX_FILE).exists()


def test_rm_keeps_the_last_ones_and_the_latest(folder: Path) -> None:
    (folder / "latest").write_text("old")
    result = invoke("checkpoint", "rm", "--keep-last", "1", str(folder))
    assert result.stdout == f"{folder / 'torn'}\n"
    (folder / "latest").write_text("new")
    assert invoke("checkpoint", "rm", "--keep-last", "2", str(folder)).stdout == ""
    assert invoke("checkpoint", "rm", "--keep-last", "1", str(folder)).stdout == f"{folder / 'old'}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "new", "notes"]
    assert invoke("checkpoint", "rm", "--keep-last", "1", str(folder), str(folder)).exit_code == 2


def test_export_writes_a_folder_for_hugging_face(folder: Path, tmp_path: Path) -> None:
    result = invoke("checkpoint", "export", "--dtype", "fp32", str(folder), str(tmp_path / "out"))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'out' / 'model.safetensors'}  ")
    again = invoke("checkpoint", "export", str(folder), str(tmp_path / "out"))
    assert (again.exit_code, again.stdout) == (1, "")
    assert "a model is there already" in again.stderr
    assert invoke("checkpoint", "export", "--max-shard-size", "many", str(folder), "x").exit_code == 2


def test_export_writes_a_torch_file_with_tied_weights(folder: Path, tmp_path: Path) -> None:
    import torch

    out = tmp_path / "out" / "model.pt"
    result = invoke("checkpoint", "export", "--to", "torch", "--dtype", "bf16", str(folder), str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    state = torch.load(out, weights_only=True)
    assert set(state) == {"w", "tied", "s", "none"}
    assert state["w"].dtype == torch.bfloat16
    assert state["w"].data_ptr() == state["tied"].data_ptr()
    assert state["w"].float().tolist() == torch.tensor(ROWS).bfloat16().float().tolist()
    assert sorted(path.name for path in out.parent.iterdir()) == ["model.pt"]
    again = invoke("checkpoint", "export", "--to", "torch", str(folder), str(out))
    assert again.exit_code == 1
    assert "it is there already" in again.stderr


def test_diff_says_which_tensors_and_values_differ_and_by_how_much(folder: Path, tmp_path: Path) -> None:
    same = invoke("checkpoint", "diff", str(folder / "old"), str(folder / "new"))
    assert (same.exit_code, same.stdout) == (0, "")
    assert "are the same" in same.stderr
    index = write_two_files(tmp_path / "other")
    index.values["counters"]["global_steps"] = 4
    index.values["note"] = "x"
    (tmp_path / "other" / INDEX_FILE).write_bytes(index.to_bytes())
    path = tmp_path / "other" / FILES[1]
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<2f", ROWS[2][2] + 0.25, ROWS[2][3] - 1.5))
    result = invoke("checkpoint", "diff", str(folder / "old"), str(tmp_path / "other"))
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["w", "param", "2", "of", "12", "1.5"] in lines
    assert ["counters.global_steps", "3", "4"] in lines
    assert ["note", "(none)", "x"] in lines
    assert len(lines) == 6
    body = json.loads(invoke("checkpoint", "diff", "--json", str(folder / "old"), str(tmp_path / "other")).stdout)
    assert [(one["name"], one["differing"], one["largest"]) for one in body["tensors"]] == [("w", 2, 1.5)]
    assert body["values"] == [{"path": "counters.global_steps", "a": 3, "b": 4}, {"path": "note", "b": "x"}]
    values = invoke("checkpoint", "diff", "--values-only", str(folder / "old"), str(tmp_path / "other"))
    assert (values.exit_code, values.stdout.splitlines()[0].split()) == (1, ["VALUE", "A", "B"])


def test_diff_compares_elements_whatever_ranks_saved_them(folder: Path, tmp_path: Path) -> None:
    from support.savers import save_one

    for size in (1, 3):
        save_one(tmp_path / f"of_{size}", "t", 2.0, size=size)
    save_one(tmp_path / "later", "t", 3.0)
    result = invoke("checkpoint", "diff", str(tmp_path / "of_1"), str(tmp_path / "of_3"))
    assert result.stdout.split() == ["VALUE", "A", "B", "world_size", "1", "3"]
    result = invoke("checkpoint", "diff", str(tmp_path / "of_3" / "t"), str(tmp_path / "later" / "t"))
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["w", "param", "35", "of", "35", "1"] in lines
    assert ["mask", "buffer", "3", "of", "3", "1"] in lines
    strange = invoke("checkpoint", "diff", str(tmp_path / "of_1"), str(folder / "old"))
    assert ["b", "param", "only", "in", "A"] in [line.split() for line in strange.stdout.splitlines()]
    assert ["s", "buffer", "only", "in", "B"] in [line.split() for line in strange.stdout.splitlines()]
    assert any("shape [7, 5] and [3, 4]" in line for line in strange.stdout.splitlines())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["latest", f"new/{INDEX_FILE}", f"new/{FILES[1]}", ".saving-0a0a0a0a"])
def test_no_verb_waits_for_what_is_no_file_and_each_says_what_it_is(folder: Path, place: str, kind: str) -> None:
    put_in_place(folder / place, kind)
    # A link is not followed where a save writes none.
    said = "symbolic link" if kind == "device" and "/" in place else f"{kind}.*; expected a regular file"
    out = str(folder.parent / "out")
    told = {
        verb: invoke("checkpoint", verb, *words)
        for verb, words in {
            "ls": [str(folder)],
            "show": [str(folder)],
            "verify": [str(folder)],
            "diff": [str(folder), str(folder / "old")],
            "export": [str(folder), out],
        }.items()
    }
    if place.startswith("."):  # a save's mark that nobody has locked is of one that is over
        assert {result.exit_code for result in told.values()} <= {0, 1}
        return
    assert {verb for verb, result in told.items() if result.exit_code == 0} == (
        {"ls", "show"} if place.endswith(".safetensors") else {"ls"}
    )
    for verb, result in told.items():
        if verb != "show" or not place.endswith(".safetensors"):  # which reads none of them
            assert re.search(f"{place}: .*{said}", result.stderr), (verb, result.stderr)
