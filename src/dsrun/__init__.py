"""dsrun: start and run distributed PyTorch training.

The face of the runtime, loaded on first use: importing `dsrun` imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = version = "0.2.0"

if TYPE_CHECKING:
    from dsrun import checkpointing as checkpointing
    from dsrun import comm as comm
    from dsrun import data as data
    from dsrun import long_sequence as long_sequence
    from dsrun import ops as ops
    from dsrun import pipe as pipe
    from dsrun import profiling as profiling
    from dsrun import utils as utils
    from dsrun import zero as zero
    from dsrun.contract.heartbeats import heartbeat as heartbeat
    from dsrun.runtime.engine.compose.arguments import add_config_arguments as add_config_arguments
    from dsrun.runtime.engine.compose.distributed import init_distributed as init_distributed
    from dsrun.runtime.engine.engine import Engine as Engine
    from dsrun.runtime.engine.initialize import initialize as initialize
    from dsrun.runtime.engine.model.tensor_request import tp_model_init as tp_model_init
    from dsrun.runtime.parallel.pipeline.module import PipelineModule as PipelineModule
    from dsrun.runtime.zero.creation.on_device import OnDevice as OnDevice

    DeepSpeedEngine = Engine

else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun": ("checkpointing", "comm", "data", "long_sequence", "ops", "pipe", "profiling", "utils", "zero"),
            "dsrun.contract.heartbeats": ("heartbeat",),
            "dsrun.runtime.engine.compose.arguments": ("add_config_arguments",),
            "dsrun.runtime.engine.compose.distributed": ("init_distributed",),
            "dsrun.runtime.engine.engine": ("Engine", "Engine as DeepSpeedEngine"),
            "dsrun.runtime.engine.initialize": ("initialize",),
            "dsrun.runtime.engine.model.tensor_request": ("tp_model_init",),
            "dsrun.runtime.parallel.pipeline.module": ("PipelineModule",),
            "dsrun.runtime.zero.creation.on_device": ("OnDevice",),
        },
        own=("__version__", "version"),
    )
