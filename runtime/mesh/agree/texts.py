"""Text from every rank of an axis to every other one: for the few words that ranks have to tell each other at times."""

from __future__ import annotations

import torch

from ..collectives import Collectives
from .same import largest


def gather_texts(text: str, collectives: Collectives, *, device: torch.device, label: str) -> list[str]:
    """Returns the text of each rank; an all-reduce of one number, and an all-gather of as much as the longest takes.

    Args:
        text: this rank's text.
        collectives: the axis; every rank must call.
        device: device of the collectives' tensors.
        label: name of the texts, shown to observers while a rank waits.
    """
    mine = bytearray(text.encode())
    (most,) = largest([float(len(mine))], collectives, device=device, label=label)
    # The length comes first: a text may end in any byte.
    row = torch.zeros(8 + int(most), dtype=torch.uint8)
    row[:8] = torch.tensor(list(len(mine).to_bytes(8, "little")), dtype=torch.uint8)
    if mine:
        row[8 : 8 + len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
    rows = torch.empty(row.numel() * collectives.size, dtype=torch.uint8, device=device)
    collectives.all_gather(rows, row.to(device), label=label).wait()
    with collectives.reading(label):
        everyone = rows.cpu().view(collectives.size, -1)
    return [_text_of(bytes(one.tolist())) for one in everyone]


def _text_of(row: bytes) -> str:
    return row[8 : 8 + int.from_bytes(row[:8], "little")].decode()
