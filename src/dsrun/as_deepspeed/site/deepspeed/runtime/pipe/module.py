"""deepspeed.runtime.pipe.module: models as lists of layers."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.pipe": ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]}
)
