"""The `checkpoint` verb at an address: as at a folder, and what it takes no address for."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from support.checkpoints import ROWS, write_two_files
from support.cli import invoke
from support.stores import Held, registered

RUN = "shaky://bucket/run"


@pytest.fixture
def held(tmp_path: Path) -> Generator[Held]:
    """A store with two tags, of which `latest` names the second."""
    with registered() as held:
        for name in ("old", "new"):
            write_two_files(tmp_path / name)
            for path in sorted((tmp_path / name).iterdir(), key=lambda path: path.name == "index.json"):
                held.put(f"bucket/run/{name}/{path.name}", path.read_bytes())
        held.put("bucket/run/latest", b"new")
        yield held


def test_checkpoints_are_listed_shown_and_verified(held: Held) -> None:
    result = invoke("checkpoint", "ls", RUN)
    lines = [line.split() for line in result.stdout.splitlines()[1:]]
    assert [(line[0], *line[5:]) for line in lines] == [("old", "complete"), ("new", "complete,", "latest")]
    body = json.loads(invoke("checkpoint", "show", "--json", RUN).stdout)
    assert (body["path"], body["saved"][:10]) == (f"{RUN}/new", "1970-01-01")
    assert invoke("checkpoint", "verify", "--all", RUN).stdout == f"{RUN}/old: ok\n{RUN}/new: ok\n"
    name = next(name for name in held.names() if "old/rank-00001" in name)
    held.files[name] = (held.files[name][0][:-1] + b"?", 1.0)
    result = invoke("checkpoint", "verify", f"{RUN}/old")
    assert result.exit_code == 1
    assert f"shaky://{name}: bytes 0 to" in result.stderr


def test_two_of_them_are_compared_and_their_weights_exported(held: Held, tmp_path: Path) -> None:
    assert invoke("checkpoint", "diff", f"{RUN}/old", f"{RUN}/new").exit_code == 0
    assert invoke("checkpoint", "diff", f"{RUN}/old", str(tmp_path / "new")).exit_code == 0, "one here, one there"
    out = tmp_path / "out"
    assert invoke("checkpoint", "export", "--dtype", "stored", RUN, str(out)).exit_code == 0
    from safetensors import safe_open

    with safe_open(out / "model.safetensors", framework="np") as file:
        assert file.get_tensor("w").tolist() == ROWS


def test_they_are_removed_and_latest_names_what_is_left(held: Held) -> None:
    result = invoke("checkpoint", "rm", "--dry-run", f"{RUN}/new")
    assert (result.exit_code, len(held.names())) == (0, 7)
    result = invoke("checkpoint", "rm", f"{RUN}/new")
    assert (result.exit_code, result.stdout) == (0, f"{RUN}/new\n")
    assert held.files["bucket/run/latest"][0] == b"old"
    assert invoke("checkpoint", "rm", f"{RUN}/new").exit_code == 1, "it is gone"
    assert invoke("checkpoint", "rm", "--keep-last", "1", RUN).stdout == ""
    assert invoke("checkpoint", "rm", f"{RUN}/old").exit_code == 0
    assert not held.names()
    assert invoke("checkpoint", "ls", RUN).stderr == f"dsrun: no checkpoints in {RUN}\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["export", RUN, f"{RUN}/out"], 2, f"OUT is {RUN}/out; expected a path"),
        (["import", "--trust-pickle", RUN, "out"], 2, f"SOURCE is {RUN}; expected a path"),
        (["show", "s3://"], 2, "s3://: it names no bucket and no folder"),
        (["ls", "nowhere://run"], 1, "nowhere://: no such store is known"),
        (["show", f"{RUN}/other"], 1, f"{RUN}/other: there is no checkpoint here"),
    ],
)
def test_what_no_address_will_do_for_is_said(held: Held, words: list[str], code: int, said: str) -> None:
    result = invoke("checkpoint", *words)
    assert result.exit_code == code
    assert said in result.stderr
