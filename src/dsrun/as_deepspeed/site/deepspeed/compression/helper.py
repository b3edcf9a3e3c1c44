"""deepspeed.compression.helper: attributes by their paths."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.as_deepspeed.attribute_paths": ["recursive_getattr", "recursive_setattr"]}
)
