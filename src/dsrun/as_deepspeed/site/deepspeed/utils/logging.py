"""deepspeed.utils.logging: dsrun's logger."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__, {"dsrun.log_on_ranks": ["log_dist", "log_dist_once", "logger", "set_log_level_from_string"]}
)
