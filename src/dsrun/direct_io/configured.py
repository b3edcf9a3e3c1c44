"""From the config's section `aio` to how files are read and written."""

from __future__ import annotations

from dsrun.config.sections.memory import Aio
from dsrun.direct_io.settings import IoSettings


def io_settings(aio: Aio) -> IoSettings:
    """Returns what the section says."""
    return IoSettings(
        block_bytes=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.intra_op_parallelism,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
        verify=aio.verify,
    )
