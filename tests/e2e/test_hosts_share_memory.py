"""A job over two hosts of different size trains to the bits of the same ranks on one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.many_hosts import hostfile, run_on_hosts
from support.namespaces import hosts, why_no_hosts
from support.ranks import run_ranks

_WHY_NOT = why_no_hosts()
pytestmark = [pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)), pytest.mark.timeout(180)]

PROGRAM = """
import hashlib
import torch
from torch import nn
import dsrun


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

torch.manual_seed(5)
model = Net()
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}
engine = dsrun.initialize(model=model, config=settings)[0]
losses = []
for number in range(6):
    generator = torch.Generator().manual_seed(100 * number + engine.global_rank)
    loss = engine(torch.randn(2, 24, generator=generator).bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item().hex())
norm = engine.get_global_grad_norm().hex()
own = [unit.master for unit in engine._sharded.units]
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in own)).hexdigest()
kind = type(engine._mesh.world).__name__
result = f"{engine.global_rank} {norm} {losses[-1]} {digest}"
print(kind, result, flush=True)
engine.destroy()
"""


def _on_one_host() -> str:
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    return f"{scope['kind']} {scope['result']}"


def test_hosts_of_three_ranks_and_of_one_train_to_the_bits_of_one_host(tmp_path: Path) -> None:
    here = run_ranks(4, _on_one_host)
    assert {line.split()[0] for line in here} == {"SharedMemoryCollectives"}
    (tmp_path / "rig").mkdir()
    with hosts(2, tmp_path / "rig") as rig:
        work = rig.folder / "work"
        work.mkdir()
        (work / "train.py").write_text(PROGRAM)
        ended = run_on_hosts(rig, "train.py", cwd=work, hosts=hostfile(rig, slots=[3, 1]))
    assert ended.exit_code == 0, ended.stderr
    there = sorted(line.partition("] ")[2] for line in ended.stdout.splitlines() if "Collectives " in line)
    assert there == sorted(line.replace("SharedMemory", "Hierarchical") for line in here)
