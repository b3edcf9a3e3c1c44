"""The mark of a cut vocabulary: on the parameter whatever becomes of its memory, and on nothing made of it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart, note_vocabulary, vocabulary_of

PART = VocabularyPart(AloneCollectives(), 4, 7, 10)


def test_the_mark_stays_on_a_parameter_that_gets_other_memory_or_another_dtype() -> None:
    head = nn.Linear(3, 10, bias=False)
    note_vocabulary(head.weight, PART)
    head.weight.data = head.weight.detach()[PART.start : PART.stop].clone()
    head.to(torch.bfloat16)
    assert vocabulary_of(head.weight) is PART
    assert PART.tokens == head.weight.shape[0] == 3


def test_what_is_whole_has_no_mark_and_neither_has_what_is_computed() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    assert vocabulary_of(weight) is None
    note_vocabulary(weight, PART)
    assert vocabulary_of(weight * 1) is None
    assert vocabulary_of(weight.detach()) is None


def test_a_copy_of_who_knows_the_part_has_the_same_ranks() -> None:
    assert copy.deepcopy({"part": PART})["part"].axis is PART.axis
