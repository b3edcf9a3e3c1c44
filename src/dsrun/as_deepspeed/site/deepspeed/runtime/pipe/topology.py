"""deepspeed.runtime.pipe.topology: ranks on a grid."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.pipe": [
            *("PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"),
        ]
    },
)
