"""Correctness on a GPU, run by the launcher: `dsrun -n 1 scripts/gpu/parity.py cuda stages`.

Losses of 10 steps of a small Llama, with accumulation, on so few batches that it learns them. `stages`: the same bits
at every ZeRO stage, on a stream of the script's own too, equal to plain torch's within rounding, and one wait of the
host for the device a step. `tiers`: the same with states, parameters and activations in host memory, and around saves
and resumptions. `formats`: the same bits at every stage under autocast, in fp16, with 8-bit states, and with compiled
blocks. The word `short` behind takes fewer steps and stages, to try the script itself.

Each row is tried, whatever became of the one before. Behind each, one JSON line with all so far is on stdout; the exit
code is 1 if one failed. Waits are counted by torch's own debug mode, which sees blocking copies and `.item()`, but not
`synchronize()` of a stream or an event.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dsrun
from gpu.models import Llama
from gpu.shapes import TINY

_ACCUMULATION = 2
_LR = 3e-3
#: How far losses, which go down by more than 1, may lie from plain torch's: rounding of fp32, and of bf16.
_NEAR = {"fp32": 1e-3, "bf16": 0.02}

Config = dict[str, Any]
#: Finds what is wrong, in words; nothing, if all is well.
Check = Callable[[], Iterable[str]]


class Parity:
    """Rows of the check on one device.

    Args:
        device: cuda or cpu.
        steps: number of steps in each run, an even number.
        stages: ZeRO stages to compare with stage 0.
    """

    def __init__(self, device: str, *, steps: int = 10, stages: Sequence[int] = (0, 1, 2, 3)) -> None:
        self._device, self._stages = device, stages
        generator = torch.Generator().manual_seed(2)
        batches = [torch.randint(TINY.vocabulary, (4, 33), generator=generator) for _ in range(_ACCUMULATION)]
        self._data = [batch.to(device) for batch in batches] * steps

    def rows(self, group: str) -> dict[str, Check]:
        """Returns the checks of a group by name, what says most first."""
        match group:
            case "stages":
                return {
                    **{
                        f"{name}, clipping {clipping}: stages": partial(self.stages, config(name, clipping=clipping))
                        for name in ("fp32", "bf16")
                        for clipping in (0.0, 0.5)
                    },
                    **{f"{name}: plain torch": partial(self.plain, name) for name in ("fp32", "bf16")},
                    **{f"{name}: stream of the script": partial(self.stream, name) for name in ("fp32", "bf16")},
                }
            case "tiers":
                return {
                    "optimizer in host memory": self.host_optimizer,
                    "activations in host memory": self.host_activations,
                    "saved at once": partial(self.saved, asynchronous=False),
                    "saved beside training": partial(self.saved, asynchronous=True),
                    "copied behind training": partial(self.saved, asynchronous=True, when_copied="behind"),
                    "resumed at every stage": self.resumed,
                }
            case "formats":
                eight_bit = {"optimizer": {"type": "AdamW8bit", "params": {"lr": _LR}}}
                autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
                # A scale from which no step is skipped.
                fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
                return {
                    "autocast: stages": partial(self.stages, config("fp32", clipping=0.5) | autocast),
                    "fp16: stages": partial(self.stages, config("fp32", clipping=0.5) | fp16, waits=None),
                    "8-bit states: stages": partial(self.stages, config("bf16", clipping=0.5) | eight_bit, waits=None),
                    "compiled blocks: stages": self.compiled,
                }
            case _:
                raise SystemExit(f"error: unknown group {group!r}; expected stages, tiers or formats")

    def stages(self, base: Config, *, waits: int | None = 1) -> Iterable[str]:
        """Every stage has the losses of stage 0, and waits so often a step; None: whatever it does."""
        first = self._losses(at_stage(base, 0))
        yield from ("losses are no numbers" for loss in first[:1] if loss != loss)
        for stage in self._stages:
            engine = self._engine(at_stage(base, stage))
            yield from _differences(train(engine, self._data), first, f"stage {stage}", "stage 0")
            if self._device == "cuda" and waits is not None:
                found = waits_of_a_step(engine, self._data)
                if found != waits:
                    yield f"stage {stage}: the host waits for the device {found} times a step; expected {waits}"
            engine.destroy()

    def plain(self, name: str) -> Iterable[str]:
        """Stage 0 is near plain torch: in bf16 with masters in fp32."""
        expected = plain_losses(fresh().to(self._device), self._data, halves=name == "bf16")
        yield from _far(self._losses(at_stage(config(name, clipping=0.0), 0)), expected, _NEAR[name], "plain torch")

    def stream(self, name: str) -> Iterable[str]:
        """A script that trains on a stream of its own has the same losses."""
        base = config(name, clipping=0.5)
        first = self._losses(at_stage(base, 0))
        for stage in self._stages:
            own: AbstractContextManager[object] = nullcontext()
            if self._device == "cuda":
                # What was made on the stream before is there.
                torch.cuda.synchronize()
                own = torch.cuda.stream(torch.cuda.Stream())
            with own:
                losses = self._losses(at_stage(base, stage))
            yield from _differences(losses, first, f"stage {stage}", "the default stream")

    def host_optimizer(self) -> Iterable[str]:
        """Stages agree to the bit with their states in host memory, and with the device's within rounding."""
        base = config("bf16", clipping=0.5)
        cpu = {"device": "cpu", "pin_memory": True}
        sections: dict[str, Config] = {
            **{f"stage {stage}": {"stage": stage, "offload_optimizer": cpu} for stage in (1, 2, 3)},
            "stage 3, parameters too": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu},
        }
        first: list[float] = []
        for name, section in sections.items():
            losses = self._losses(base | {"zero_optimization": section})
            first = first or losses
            yield from _differences(losses, first, name, "stage 1")
        yield from _far(first, self._losses(at_stage(base, 1)), _NEAR["bf16"], "the same with states on the device")

    def host_activations(self) -> Iterable[str]:
        """Inputs of blocks that go to host memory and come back change nothing."""
        base = config("bf16", clipping=0.5)
        first = self._losses(at_stage(base, 0))
        for stage in self._stages:
            moved = at_stage(base, stage) | {"activation_checkpointing": {"cpu_checkpointing": True}}
            yield from _differences(self._losses(moved), first, f"stage {stage}", "stage 0 that keeps them")

    def saved(self, **section: Any) -> Iterable[str]:
        """A save half-way changes no loss, and what it holds is what training went on from."""
        base = config("bf16", clipping=0.5) | {"checkpoint": section}
        half = len(self._data) // 2
        for stage in (0, 3):
            expected = self._losses(at_stage(base, stage))
            with tempfile.TemporaryDirectory() as folder:
                engine = self._engine(at_stage(base, stage))
                losses = train(engine, self._data[:half])
                engine.save_checkpoint(folder)
                losses += train(engine, self._data[half:])
                engine.wait_for_checkpoint()
                engine.destroy()
                yield from _differences(losses, expected, f"stage {stage} with a save", "without one")
                engine = self._engine(at_stage(base, stage))
                engine.load_checkpoint(folder)
                resumed = train(engine, self._data[half:])
                engine.destroy()
                yield from _differences(resumed, expected[half:], f"stage {stage} resumed", "the run that was saved")

    def resumed(self) -> Iterable[str]:
        """Every stage goes on from a checkpoint of stage 3 as that does."""
        base = config("bf16", clipping=0.5)
        half = len(self._data) // 2
        with tempfile.TemporaryDirectory() as folder:
            engine = self._engine(at_stage(base, 3))
            train(engine, self._data[:half])
            engine.save_checkpoint(folder)
            expected = train(engine, self._data[half:])
            engine.wait_for_checkpoint()
            engine.destroy()
            for stage in self._stages:
                engine = self._engine(at_stage(base, stage))
                engine.load_checkpoint(folder)
                losses = train(engine, self._data[half:])
                engine.destroy()
                yield from _differences(losses, expected, f"stage {stage} resumed", "stage 3 that went on")

    def compiled(self) -> Iterable[str]:
        """Compiled blocks have the same losses at every stage, near those of blocks that are not."""
        base = config("bf16", clipping=0.5)
        first: list[float] = []
        for stage in self._stages:
            model = fresh()
            for block in model.blocks:
                block.compile(backend="inductor" if self._device == "cuda" else "aot_eager")
            losses = self._losses(at_stage(base, stage), model)
            first = first or losses
            yield from _differences(losses, first, f"stage {stage}", "stage 0")
        yield from _far(first, self._losses(at_stage(base, 0)), _NEAR["bf16"], "the same without torch.compile")

    def _losses(self, config: Config, model: nn.Module | None = None) -> list[float]:
        engine = self._engine(config, model)
        losses = train(engine, self._data)
        engine.destroy()
        return losses

    def _engine(self, config: Config, model: nn.Module | None = None) -> dsrun.Engine:
        engine, *_ = dsrun.initialize(model=model or fresh(), config=config)
        return engine


def main() -> None:
    device, *groups = sys.argv[1:]
    # Reductions of an embedding's gradient by atomic adds differ from run to run.
    torch.use_deterministic_algorithms(True)
    short = "short" in groups
    parity = Parity(device, steps=2, stages=(0, 3)) if short else Parity(device)
    checks = {name: check for group in groups if group != "short" for name, check in parity.rows(group).items()}
    found: dict[str, Any] = {}
    for found in tried(checks, why_lost=_why_lost if device == "cuda" else lambda: None):
        print(json.dumps(found), flush=True)
    if "why" in found:
        raise SystemExit(1)


def tried(checks: Mapping[str, Check], *, why_lost: Callable[[], str | None]) -> Iterator[dict[str, Any]]:
    """Tries checks, and yields the report so far behind each.

    Args:
        checks: checks by the names of their rows.
        why_lost: function that returns the device's error after a failed check; None if the device still works.

    Yields:
        `rows` (state, what is wrong, seconds), and `why` once one failed. None is tried on a device that is lost.
    """
    rows: dict[str, Any] = {name: {"state": "not run"} for name in checks}
    whys: list[str] = []
    for name, check in checks.items():
        started_s = time.perf_counter()
        wrong = _wrong_in(check)
        seconds = round(time.perf_counter() - started_s, 1)
        rows[name] = {"state": "failed" if wrong else "ok", "seconds": seconds, "wrong": wrong}
        lost = why_lost() if wrong else None
        whys += [f"{name}: {wrong[0]}"] if wrong else []
        whys += [f"the device answers nothing any more: {lost}"] if lost is not None else []
        yield {"rows": dict(rows), **({"why": "; ".join(whys)} if whys else {})}
        if lost is not None:
            return


def _wrong_in(check: Check) -> list[str]:
    """Returns what is wrong; an exception ends its row, and no other."""
    wrong: list[str] = []
    try:
        wrong.extend(check())
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}"[:1000])
    return wrong


def _why_lost() -> str | None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def config(name: str, *, clipping: float) -> Config:
    """Returns the config of a run in fp32 or bf16, without a stage."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": _ACCUMULATION,
        "gradient_clipping": clipping,
        "bf16": {"enabled": name == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR}},
        "steps_per_print": 0,
    }


def at_stage(base: Config, stage: int) -> Config:
    """Returns a config at a ZeRO stage."""
    return base | {"zero_optimization": {"stage": stage}}


def fresh() -> Llama:
    """Returns the model as every run begins with it."""
    torch.manual_seed(3)
    return Llama(TINY)


def train(engine: dsrun.Engine, data: list[Tensor]) -> list[float]:
    """Returns the loss of every micro step."""
    losses: list[Tensor] = []
    for tokens_BT in data:
        loss = engine(tokens_BT)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def waits_of_a_step(engine: dsrun.Engine, data: list[Tensor]) -> int:
    """Returns how often the host waited for the device in one whole step, as far as torch's debug mode sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for tokens_BT in data[:_ACCUMULATION]:
                engine.backward(engine(tokens_BT))
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def plain_losses(model: Llama, data: list[Tensor], *, halves: bool) -> list[float]:
    """Returns the losses of plain torch; in bf16 parameters are copies of fp32 masters, which sum the gradients."""
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    if halves:
        model.to(torch.bfloat16)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=_LR, weight_decay=0.0, fused=True)
    losses: list[float] = []
    for index, tokens_BT in enumerate(data):
        loss = model(tokens_BT)
        (loss / _ACCUMULATION).backward()
        losses.append(float(loss))
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None, "every parameter is used"
            grad = param.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            param.grad = None
        if index % _ACCUMULATION == _ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
    return losses


def _differences(losses: list[float], expected: list[float], name: str, other: str) -> Iterable[str]:
    """Yields the first step in which two runs differ in a bit."""
    for step, (one, two) in enumerate(zip(losses, expected, strict=True)):
        if one != two:
            yield f"{name} differs from {other} in micro step {step}: {one!r} and {two!r}"
            return


def _far(losses: list[float], expected: list[float], tolerance: float, other: str) -> Iterable[str]:
    """Yields the largest difference of two runs, if it is too large; no number is too far from any."""
    distances = [abs(one - two) for one, two in zip(losses, expected, strict=True)]
    if not all(distance <= tolerance for distance in distances):
        yield f"a loss lies {max(distances):.2g} from {other}'s; expected {tolerance:g} at most"


if __name__ == "__main__":
    main()
