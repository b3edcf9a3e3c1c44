"""Texts of all ranks, whatever is in them."""

from __future__ import annotations

import torch

from dsrun.runtime.mesh.agree.texts import gather_texts
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld


def test_every_rank_gets_the_text_of_each_rank_of_whatever_length() -> None:
    texts = ["", "käse\0", "a" * 1000]

    def body(collectives: LoopbackCollectives) -> list[str]:
        return gather_texts(texts[collectives.rank], collectives, device=torch.device("cpu"), label="texts")

    assert LoopbackWorld(3).run(body) == [texts] * 3
