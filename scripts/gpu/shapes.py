"""Sizes of the models that the GPU check trains, and what fits a machine: arithmetic, torch is not imported."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: Share of a machine's memory that a contender may be planned to take.
_USABLE = 0.85


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama-like model."""

    width: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int

    def numel(self) -> int:
        """Returns how many parameters a model of this shape has."""
        return self._outside_blocks() + self.layers * self._of_a_block()

    def layers_within(self, nbytes: int, *, bytes_per_parameter: int) -> int:
        """Returns how many blocks fit, at most this shape's own and at least one.

        Args:
            nbytes: bytes of all the memory that there is; only a share of it is planned for.
            bytes_per_parameter: bytes of this memory that training takes for each parameter.
        """
        numel = int(_USABLE * nbytes / bytes_per_parameter)
        return max(1, min(self.layers, (numel - self._outside_blocks()) // self._of_a_block()))

    def with_layers(self, layers: int) -> LlamaShape:
        """Returns the same model with another number of blocks."""
        return dataclasses.replace(self, layers=layers)

    def _outside_blocks(self) -> int:
        return 2 * self.vocabulary * self.width + self.width

    def _of_a_block(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.mlp + 2 * self.width


#: 1.3 billion parameters: the shape that is compared.
LLAMA_1B3 = LlamaShape(width=2048, layers=24, heads=16, mlp=5504, vocabulary=32_000)
#: What offload is measured on: 3.8 billion, and Llama 2's shape of 6.7 billion.
LLAMA_4B = LlamaShape(width=3072, layers=32, heads=24, mlp=8192, vocabulary=32_000)
LLAMA_7B = LlamaShape(width=4096, layers=32, heads=32, mlp=11_008, vocabulary=32_000)
TINY = LlamaShape(width=64, layers=2, heads=2, mlp=128, vocabulary=256)
#: Shapes of the parts that measure offload, by the word they are asked for with.
OFFLOADED: dict[str, LlamaShape] = {"4B": LLAMA_4B, "7B": LLAMA_7B, "tiny": TINY}
