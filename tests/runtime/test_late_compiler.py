"""The compiler comes when something compiles, changes nothing before, and finds all as ever then.

In processes of their own, for the compiler comes once, and those of other tests have it: forked from one interpreter
that has imported torch and nothing of the compiler.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.forked_programs import Ended, run_programs, with_words

#: Defines `train`, whose result is equal bit for bit where the same was computed.
TRAIN = """
import copy, sys
import torch, dsrun
from torch import nn, optim

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def train(stage, optimizer=ADAMW, **more):
    torch.manual_seed(1)
    model = Net()
    zero = {"stage": stage, **more.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        **more,
    }
    engine, *_ = dsrun.initialize(model=model, config=config)
    losses = []
    for step in range(5):  # the rate is 0 in the first two steps, and a loss shows the updates before it
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses

def is_there():
    return "torch._dynamo" in sys.modules
"""

#: Trains without the compiler; `AGAIN` does it with the compiler.
TRAININGS = """
def all_trainings():
    came = [
        train(0, {"type": "SGD", "params": {"lr": 0.1}})[1],
        train(2)[1],
        train(3, bf16={"enabled": True}, activation_checkpointing={"blocks": ["layers.*"], "policy": "every_block"})[1],
        train(2, zero={"offload_optimizer": {"device": "cpu"}})[1],
        train(3, zero={"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}})[1],
    ]
    engine, losses = train(2)
    engine.save_checkpoint(sys.argv[1])
    engine.load_checkpoint(sys.argv[1])
    return came + [losses]

late = all_trainings()
assert not is_there()
"""

#: Steps every optimizer of torch.optim, some in their other forms, and all that a config can name.
OPTIMIZERS = """
from dsrun.runtime.late_compiler import postpone_compiler
from dsrun.config.sections.optimizer_table import OPTIMIZER_ROWS

NAMES = [name for name, kind in vars(optim).items()
         if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer]
FORMS = [(name, {}) for name in NAMES]
FORMS += [("Adam", {"foreach": True}), ("Adam", {"fused": True, "amsgrad": True}), ("SGD", {"momentum": 0.9})]

def stepped(name, options):
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, sparse=True) if name == "SparseAdam" else nn.Linear(6, 4, bias=name != "Muon")
    x = torch.tensor([1, 3]) if name == "SparseAdam" else torch.ones(3, 6)
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01, **options)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
    differentiates = []

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.register_step_post_hook(lambda *_: differentiates.append(torch.is_grad_enabled()))
    for step in range(4):
        optimizer.step(closure)
        scheduler.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.is_grad_enabled()
    return [differentiates, *(param.tolist() for param in model.parameters())]

def all_optimizers():
    came = {f"{name} {options}": stepped(name, options) for name, options in FORMS}
    for name in (name for row in OPTIMIZER_ROWS if row.params is not None for name in row.names):
        engine, losses = train(2, {"type": name, "params": {"lr": 0.01}})
        came[name] = [losses, *(param.tolist() for param in engine.module.parameters())]
    return came

postpone_compiler()
stepped_late = all_optimizers()
assert not is_there()
"""

#: With the compiler, what `TRAININGS` and `OPTIMIZERS` did without it; prints what differs, and how many were stepped.
AGAIN = """
import json
import torch._dynamo
again = all_optimizers()
assert stepped_late.keys() == again.keys()
print(json.dumps({
    "trainings": late == all_trainings(),
    "optimizers": [name for name in again if stepped_late[name] != again[name]],
    "stepped": len(again),
}))
"""

#: A model, and an optimizer of torch's own, compiled after they have run without a compiler.
COMPILED = """
from torch.optim.optimizer import _use_grad_for_differentiable
from dsrun.runtime.own_hooks import OwnHook

engines = {stage: train(stage)[0] for stage in (0, 3)}
own = nn.Linear(3, 3)
plain = optim.SGD(own.parameters(), lr=0.1)
own(torch.ones(3)).sum().backward()
plain.step()
assert not is_there()
hooks = [hook for engine in engines.values() for module in engine.module.modules()
         for hook in module._forward_pre_hooks.values() if isinstance(hook, OwnHook)]
assert hooks
assert not any(hasattr(hook.func, "_torchdynamo_disable") for hook in hooks)

x = torch.ones(2, 8)
eager = {stage: engine(x) for stage, engine in engines.items()}
frames = []
def backend(graph, _):
    frames.append(graph)
    return graph.forward

for stage, engine in engines.items():
    engine.module.compile(backend=backend)
    frames.clear()
    assert torch.equal(engine(x), eager[stage]), stage
    assert frames, stage
    engine.backward(engine(x).sum())
    engine.step()
assert is_there()
assert all(hook.func._torchdynamo_disable for hook in hooks)

# Of torch's own, all is as in a process that has had the compiler from the start.
step = optim.SGD.step
while hasattr(step, "__wrapped__") and step.__code__ is not _use_grad_for_differentiable(print).__code__:
    step = step.__wrapped__
assert "graph_break" in step.__code__.co_names
bare = optim.Optimizer.zero_grad.__wrapped__
assert getattr(bare, "__dynamo_disable", None) is not bare
before = own.weight.clone()
@torch.compile(backend=backend)
def update():
    plain.step()
own(torch.ones(3)).sum().backward()
gradient = own.weight.grad.clone()
update()
assert torch.equal(own.weight, before - 0.1 * gradient)
"""


#: Takes what this module relies on away: the place where a function keeps what the compiler made of it.
OTHERWISE = """
import functools, torch._compile
def other(fn=None, recursive=True):
    if fn is None:
        return functools.partial(other, recursive=recursive)
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        import torch._dynamo
        return torch._dynamo.disable(fn, recursive, wrapping=False)(*args, **kwargs)
    return inner
from dsrun.runtime.compat import run_optimizers_uncompiled
torch._disable_dynamo = other
before = optim.SGD.step.__code__
assert run_optimizers_uncompiled() is None
assert optim.SGD.step.__code__ is before
train(2)
assert is_there()
"""

SOURCES = (TRAININGS + OPTIMIZERS + AGAIN, COMPILED, OTHERWISE)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the process of each source ended, and what it said."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    programs = [with_words(TRAIN + source, folder) for source in SOURCES]
    return dict(
        zip(SOURCES, run_programs(programs, modules=["dsrun.runtime.engine.initialize"], timeout_s=500), strict=True)
    )


def said_by(source: str, ended: dict[str, Ended]) -> str:
    """Returns what a process said that ended well."""
    end = ended[source]
    assert end.code == 0, end.err
    return end.out


def again(ended: dict[str, Ended]) -> dict[str, Any]:
    """Returns how what was done without the compiler and with it compares."""
    found: dict[str, Any] = json.loads(said_by(SOURCES[0], ended).splitlines()[-1])
    return found


@pytest.mark.timeout(600)  # the first test runs all processes
def test_a_training_that_compiles_nothing_never_imports_the_compiler_and_gives_the_same_bits(
    ended: dict[str, Ended],
) -> None:
    assert again(ended)["trainings"]


@pytest.mark.timeout(600)
def test_every_optimizer_gives_the_same_bits_with_the_compiler_and_without(ended: dict[str, Ended]) -> None:
    found = again(ended)
    assert found["optimizers"] == []
    assert found["stepped"] > 25


@pytest.mark.timeout(600)
def test_what_is_compiled_later_is_compiled_as_ever(ended: dict[str, Ended]) -> None:
    said_by(COMPILED, ended)


@pytest.mark.timeout(600)
def test_a_torch_that_hides_otherwise_imports_the_compiler_as_before(ended: dict[str, Ended]) -> None:
    said_by(OTHERWISE, ended)
