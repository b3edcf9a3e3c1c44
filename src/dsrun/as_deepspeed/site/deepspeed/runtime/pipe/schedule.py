"""deepspeed.runtime.pipe.schedule: what stages do, slot by slot."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.runtime.parallel.pipeline.schedule": [
            *("BackwardPass", "BufferOpInstruction", "DataParallelSchedule", "ForwardPass", "InferenceSchedule"),
            *("LoadMicroBatch", "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad"),
            *("ReduceGrads", "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule"),
        ]
    },
)
