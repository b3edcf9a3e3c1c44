"""Every byte of every extent lies in exactly one place, inside files that are no longer than they must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from dsrun.direct_io.settings import round_up
from dsrun.direct_io.stripes import Piece, file_sizes, pieces


def test_one_file_is_one_line_of_bytes_cut_into_calls() -> None:
    assert list(pieces(100, 250, stripe_bytes=200, files=1)) == [Piece(0, 100, 0, 100), Piece(0, 200, 100, 150)]
    assert file_sizes(350, stripe_bytes=200, files=1) == [350]


def test_stripes_are_dealt_out_to_files_in_turn() -> None:
    found = list(pieces(8, 24, stripe_bytes=8, files=2))
    assert found == [Piece(1, 0, 0, 8), Piece(0, 8, 8, 8), Piece(1, 8, 16, 8)]
    assert file_sizes(32, stripe_bytes=8, files=2) == [16, 16]
    assert file_sizes(36, stripe_bytes=8, files=2) == [20, 16]
    assert file_sizes(4, stripe_bytes=8, files=3) == [4, 0, 0]


@given(
    sizes=some.lists(some.integers(1, 50_000), min_size=1, max_size=6),
    stripe_bytes=some.sampled_from([4096, 8192, 12288]),
    files=some.integers(1, 4),
)
def test_extents_never_share_a_block_and_fill_the_files(sizes: list[int], stripe_bytes: int, files: int) -> None:
    blocks: set[tuple[int, int]] = set()
    offset = 0
    for size in sizes:
        at = 0
        for piece in pieces(offset, size, stripe_bytes=stripe_bytes, files=files):
            assert (piece.start, piece.at % 4096) == (at, 0)
            at += piece.nbytes
            mine = {(piece.file, block) for block in range(piece.at // 4096, round_up(piece.at + piece.nbytes) // 4096)}
            assert not mine & blocks
            blocks |= mine
        assert at == size
        offset += round_up(size)
    lengths = file_sizes(offset, stripe_bytes=stripe_bytes, files=files)
    assert sum(lengths) == offset == 4096 * len(blocks)
    assert all((block + 1) * 4096 <= lengths[file] for file, block in blocks)
