"""deepspeed.launcher.runner: names for those who start ranks."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {"dsrun.as_deepspeed.commands.runner": ["main"], "dsrun.launcher.plan.env_file": ["DEEPSPEED_ENVIRONMENT_NAME"]},
)

if __name__ == "__main__":
    __getattr__("main")()
