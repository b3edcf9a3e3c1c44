"""deepspeed.pipe: dsrun.pipe."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.pipe": ["LayerSpec", "PipelineModule", "TiedLayerSpec"]})
