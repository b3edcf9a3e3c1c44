"""Numbers of heads and of their columns are divided where heads are, and nowhere else."""

from __future__ import annotations

from torch import nn

from dsrun.runtime.parallel.tensor.sources.attributes import attributes_of
from dsrun.runtime.parallel.tensor.styles import COLUMN, GATHERED_COLUMN, ROW, Style


class Attention(nn.Module):
    """Attention that reshapes by what it noted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.embed_dim, self.head_dim = 4, 2, 16, 4
        self.d_model: int | None = None
        self.n_head = True
        self.q_proj, self.out_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    @property
    def all_head_size(self) -> int:
        return self.num_heads * self.head_dim


class Mlp(nn.Module):
    """An MLP that noted its width."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = 16
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)


MODEL = nn.ModuleDict({"attention": Attention(), "mlp": Mlp(), "other": Attention()})
BOTH = {"attention.q_proj": COLUMN, "attention.out_proj": ROW, "mlp.fc1": COLUMN, "mlp.fc2": ROW}


def test_a_module_with_cut_heads_has_its_numbers_divided_and_not_what_follows_from_them() -> None:
    assert attributes_of(MODEL, BOTH) == {"attention": ("num_heads", "num_kv_heads", "embed_dim")}


def test_heads_that_are_put_together_again_keep_their_numbers() -> None:
    gathered: dict[str, Style] = {"attention.q_proj": GATHERED_COLUMN, "attention.out_proj": ROW}
    assert attributes_of(MODEL, gathered) == {}
