"""A run that uses all that a resume has to bring back, and what it says of itself. For tests that end it in the middle.

Two ranks or more, fp16 with a scale that overflows and grows, accumulation, dropout, a schedule, and shuffled data with
augmentation made by worker processes.
"""

from __future__ import annotations

import re

STEPS = 20

#: Trains, saves after every third step, and says each loss to the last bit, and a digest of its weights at the end.
#: `BEFORE` is put in before each micro step. Word: the folder of the checkpoints.
TRAIN = f"""
import hashlib, os, random, signal, sys, time, torch, dsrun
from torch import nn
from torch.utils.data import Dataset

class Augmented(Dataset):
    def __len__(self):
        return 37
    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(6), x.sum() * (1 + 0.1 * random.random())

checkpoints, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# What a resume does not bring back would be other numbers: each attempt begins with a seed of its own.
torch.manual_seed(7 + attempt)
random.seed(attempt)
model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1))
engine, _, loader, _ = dsrun.initialize(model=model, training_data=Augmented(), config={{
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "dataloader_num_workers": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
    "scheduler": {{"type": "WarmupLR", "params": {{"warmup_num_steps": 30}}}},
    "fp16": {{"enabled": True, "initial_scale_power": 17, "loss_scale_window": 4, "hysteresis": 1}},
    "zero_optimization": {{"stage": 2}},
    "checkpoint": {{"save_on_signal": checkpoints, "signals": ["SIGTERM", "SIGUSR1"]}},
}})
engine.load_checkpoint(missing_ok=True)
if engine.global_steps == 0 and os.path.exists(checkpoints + "/latest"):
    engine.load_checkpoint(checkpoints)
rank = engine.global_rank
if engine.global_steps == 0:
    torch.manual_seed(100 + rank)
print("attempt", attempt, "from", engine.global_steps)
while engine.global_steps < {STEPS}:
    for x, y in loader:
        step, micro_step = engine.global_steps, engine.micro_steps
        BEFORE
        loss = (engine(x.half()).float().squeeze(1) - y).square().mean()
        engine.backward(loss)
        engine.step()
        lr = engine.get_lr()[0].hex()
        # One write, whatever thread of dsrun's says something at the same moment.
        words = ("micro step", micro_step, "loss", loss.item().hex(), "scale", engine.cur_scale, "lr", lr)
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        if micro_step % 2 and engine.global_steps % 3 == 0:
            engine.save_checkpoint(checkpoints)
        if engine.global_steps == {STEPS}:
            break
weights = engine.module_state_dict()
if rank == 0:
    digest = hashlib.sha256(b"".join(bytes(w.float().view(-1).view(torch.uint8).tolist()) for w in weights.values()))
    print("weights", digest.hexdigest(), "skipped", engine.skipped_steps)
engine.destroy()
"""


def said_by_rank(lines: list[str]) -> dict[tuple[int, int], list[str]]:
    """What ranks said of each (rank, micro step): one text, or more where a restart took it again."""
    found: dict[tuple[int, int], list[str]] = {}
    for line in lines:
        if match := re.fullmatch(r"\[(\d+)\] micro step (\d+) (loss .*)", line):
            found.setdefault((int(match[1]), int(match[2])), []).append(match[3])
    return found


def end_of(lines: list[str]) -> list[str]:
    """What was said of the weights at the end."""
    return [line for line in lines if line.startswith("[0] weights ")]
