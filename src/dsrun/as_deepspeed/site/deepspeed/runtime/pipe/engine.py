"""deepspeed.runtime.pipe.engine: the class of engines with stages."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.pipe": ["PipelineEngine", "PipelineError", "PipelineModule"]})
