"""dsrun.pipe: models as lists of layers in pipeline stages, by the names of `deepspeed.pipe`.

A face like `dsrun` itself, loaded on first use: importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.runtime.parallel.pipeline.engine_class import PipelineEngine as PipelineEngine
    from dsrun.runtime.parallel.pipeline.engine_class import PipelineError as PipelineError
    from dsrun.runtime.parallel.pipeline.grid import PipelineParallelGrid as PipelineParallelGrid
    from dsrun.runtime.parallel.pipeline.layers import LayerSpec as LayerSpec
    from dsrun.runtime.parallel.pipeline.layers import TiedLayerSpec as TiedLayerSpec
    from dsrun.runtime.parallel.pipeline.module import PipelineModule as PipelineModule
    from dsrun.runtime.parallel.pipeline.topology import PipeDataParallelTopology as PipeDataParallelTopology
    from dsrun.runtime.parallel.pipeline.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
    from dsrun.runtime.parallel.pipeline.topology import ProcessTopology as ProcessTopology

else:
    from dsrun.faces import lazy_face

    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "dsrun.runtime.parallel.pipeline.engine_class": ("PipelineEngine", "PipelineError"),
            "dsrun.runtime.parallel.pipeline.grid": ("PipelineParallelGrid",),
            "dsrun.runtime.parallel.pipeline.layers": ("LayerSpec", "TiedLayerSpec"),
            "dsrun.runtime.parallel.pipeline.module": ("PipelineModule",),
            "dsrun.runtime.parallel.pipeline.topology": (
                "PipeDataParallelTopology",
                "PipeModelDataParallelTopology",
                "ProcessTopology",
            ),
        },
    )
