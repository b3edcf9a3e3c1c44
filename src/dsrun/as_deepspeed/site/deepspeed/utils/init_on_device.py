"""deepspeed.utils.init_on_device: models built on a device."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun": ["OnDevice"]})
