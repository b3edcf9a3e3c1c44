"""Checkpoints of torch.distributed.checkpoint become dsrun's, to the bit, and nothing in their pickles is run."""

from __future__ import annotations

import enum
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.errors import CheckpointError, InputError
from dsrun.runtime.checkpoint.convert.main import import_checkpoint
from dsrun.runtime.checkpoint.format.load import read_whole
from support.ranks import run_ranks


class Tiny(nn.Module):
    """A tied weight, a buffer and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 9)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor([1.5, 2.5]))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Tiny()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.125)
    for _ in range(2):
        model.head(model.norm(model.embed(torch.tensor([0, 1, 2])))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def imported(source: Path, out: Path, **changes: Any) -> Path:
    words: dict[str, Any] = {"tag": None, "trust_pickle": True, "ignored": [], "optimizer": None, "buffers": ["seen"]}
    return import_checkpoint(source, out, **{**words, **changes})[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_model_and_optimizer_are_the_same_to_the_bit(tmp_path: Path, flat: bool, wrapped: bool) -> None:
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    whole: dict[str, Any] = {"model": weights, "optim": states}
    state_dict_saver.save({"app": whole} if wrapped else {**whole, "step": 7}, checkpoint_id=tmp_path / "dcp")
    target = imported(tmp_path / "dcp", tmp_path / "out")
    index = read_index(target)
    assert list(verify(target, index)) == []
    assert target.name == ("global_step2" if wrapped else "global_step7")
    assert index.aliases == {"head.weight": "embed.weight"}
    named = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    assert {name for name, role in index.tensors if role == "param"} == set(named)
    assert {name for name, role in index.tensors if role == "buffer"} == set(buffers)
    for name, tensor in {**named, **buffers}.items():
        role = "param" if name in named else "buffer"
        assert torch.equal(read_whole(index, target, [name], role=role)[name], tensor)
    for param, state in optimizer.state.items():
        name = next(name for name, other in named.items() if other is param)
        for key, value in state.items():
            role = key if value.ndim else f"scalar:{key}"
            assert torch.equal(read_whole(index, target, [name], role=role)[name], value)
    values = index.values["optimizer"]
    assert (values["type"], len(values["groups"]), values["groups"][0]["lr"]) == ("AdamW", 1, 0.125)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parameters_that_were_in_fewer_steps_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    model.get_parameter("embed.weight").square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optim": states, "step": 3}, checkpoint_id=tmp_path / "dcp")
    index = read_index(imported(tmp_path / "dcp", tmp_path / "out"))
    assert index.values["optimizer"]["left_out"] == [{"missed": 1, "names": ["norm.bias", "norm.weight"]}]


def _save_sharded(folder: str) -> None:
    """Saves a tensor that two ranks have a half of each."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    state_dict_saver.save({"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}}, checkpoint_id=folder)
    dist.destroy_process_group()


def test_pieces_of_several_ranks_become_whole_tensors(tmp_path: Path) -> None:
    run_ranks(2, _save_sharded, str(tmp_path / "dcp"))
    target = imported(tmp_path / "dcp", tmp_path / "out", tag="t")
    found = read_whole(read_index(target), target, ["w"], role="param")["w"]
    assert torch.equal(found, torch.arange(15.0).view(5, 3))


def _by_name(member: enum.Enum, _protocol: int) -> tuple[Any, ...]:
    """How Python 3.11.0 to 3.11.3 pickles the member of an enum."""
    return getattr, (type(member), member.name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_enums_that_are_pickled_by_getattr_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", _by_name)
    state_dict_saver.save({"model": {"w": torch.arange(3.0)}}, checkpoint_id=tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    target = imported(tmp_path / "dcp", tmp_path / "out", tag="t")
    assert read_whole(read_index(target), target, ["w"], role="param")["w"].tolist() == [0.0, 1.0, 2.0]


class Attribute:
    """Asks for an attribute of something when it is unpickled."""

    def __init__(self, owner: object, name: str) -> None:
        self.asked = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.asked


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (metadata._MEM_FORMAT_ENCODING, "__class__", "`getattr` for '__class__', which is no member"),
        (metadata._MEM_FORMAT_ENCODING, "mro", "`getattr` for 'mro', which is no member"),
        ([1], "append", "`getattr` on something else than an enum"),
        (torch.Size, "__subclasses__", "`getattr` on something else than an enum"),
        (getattr, "__self__", "`getattr` on something else than an enum"),
    ],
)
def test_no_other_attribute_is_looked_up(tmp_path: Path, owner: object, name: str, said: str) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"payload": Attribute(owner, name)}))
    with pytest.raises(CheckpointError, match=said):
        imported(tmp_path / "dcp", tmp_path / "out")


@pytest.mark.parametrize("state", [{"__wrapped__": 1}, (None, {"__defaults__": (1,)}), (None, {"__kwdefaults__": {}})])
def test_what_stands_for_getattr_is_not_filled(tmp_path: Path, state: object) -> None:
    fills = pickle.dumps(state, protocol=2)[2:].removesuffix(b".") + b"b"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x02cbuiltins\ngetattr\n" + fills + b".")
    with pytest.raises(CheckpointError, match="AttributeError: '_EnumGetattr' object has no attribute"):
        imported(tmp_path / "dcp", tmp_path / "out")


class Payload:
    """Unpickled in the usual way, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("ignored", [[], ["posix.mkdir"]])
def test_a_payload_in_the_metadata_is_named_and_never_run(tmp_path: Path, ignored: list[str]) -> None:
    (tmp_path / "dcp").mkdir()
    trap = tmp_path / "trap"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"payload": Payload(trap)}))
    with pytest.raises(InputError, match="its files are pickles"):
        imported(tmp_path / "dcp", tmp_path / "out", trust_pickle=False)
    with pytest.raises(CheckpointError, match=r"`posix\.mkdir`" if not ignored else "it is not as torch"):
        imported(tmp_path / "dcp", tmp_path / "out", ignored=ignored)
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_payload_in_the_data_is_named_and_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    state_dict_saver.save({"model": {"w": torch.ones(3)}, "args": Payload(trap)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"distcp: its pickle names `posix\.mkdir`"):
        imported(tmp_path / "dcp", tmp_path / "out")
    assert not trap.exists()
    assert not (tmp_path / "out").exists()
