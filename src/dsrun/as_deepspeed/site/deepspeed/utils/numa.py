"""deepspeed.utils.numa: numbers of cores as text."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(__name__, {"dsrun.as_deepspeed.core_list": ["parse_range", "parse_range_list"]})
