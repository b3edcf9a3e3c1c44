"""deepspeed.runtime.pipe: models in pipeline stages."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.pipe": ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]}
)
