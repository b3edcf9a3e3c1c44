"""The table names the best settings, and the section is one that the config takes."""

from __future__ import annotations

import json

from dsrun.config.load import load
from dsrun.direct_io.settings import IoSettings
from dsrun.launcher.bench.figure import figure
from dsrun.launcher.bench.nvme_sweep import SettingFigures, Sweep, Trial
from dsrun.launcher.bench.nvme_text import section, table, to_json

BEST = IoSettings(queue_depth=32, threads=2, single_submit=True)
FLOOR = IoSettings(block_bytes=16 << 20, queue_depth=1)


def measured(settings: IoSettings, write: float, read: float) -> SettingFigures:
    return SettingFigures(
        settings=settings,
        write=figure("write", "B/s", [write * 1e9, write * 1e9, 2 * write * 1e9]),
        read=figure("read", "B/s", [read * 1e9] * 3),
    )


FOUND = Sweep(
    paths=("/nvme0", "/nvme1"),
    file_bytes=1 << 30,
    direct=False,
    trials=(Trial(settings=IoSettings(), write=5e9, read=2.5e9), Trial(settings=BEST, write=6e9, read=3e9)),
    best=measured(BEST, 6, 3),
    floor=measured(FLOOR, 4, 2),
)


def test_the_table_shows_every_trial_the_best_and_the_floor() -> None:
    assert (
        table(FOUND)
        == """\
/nvme0, /nvme1: 1.0 GiB, through the page cache (O_DIRECT is refused)

block    depth  threads  calls at once  write      read
1.0 MiB  8      1        2 x 4.0 MiB    5.00 GB/s  2.50 GB/s
1.0 MiB  32     2        64 x 1.0 MiB   6.00 GB/s  3.00 GB/s  <- best

best          write  6 GB/s (6 to 12)  read  3 GB/s (3 to 3)
floor         write  4 GB/s (4 to 8)   read  2 GB/s (2 to 2)
best / floor  write  1.50              read  1.50
The floor is one direct call of 16 MiB at a time on each path, as dd makes them."""
    )


def test_the_section_is_one_that_a_config_takes() -> None:
    config = load("{" + section(BEST) + ', "train_micro_batch_size_per_gpu": 1}', world_size=1)
    aio = config.aio
    assert (aio.block_size, aio.queue_depth, aio.intra_op_parallelism) == (1 << 20, 32, 2)
    assert (aio.single_submit, aio.overlap_events) == (True, True)


def test_json_has_every_trial_and_the_spread() -> None:
    body = json.loads(json.dumps(to_json(FOUND)))
    assert (body["schema_version"], body["direct"], len(body["trials"])) == (1, False, 2)
    assert body["best"]["aio"]["queue_depth"] == 32
    assert (body["best"]["write"]["median"], body["best"]["write"]["high"]) == (6e9, 12e9)
    assert body["floor"]["read"]["unit"] == "B/s"
