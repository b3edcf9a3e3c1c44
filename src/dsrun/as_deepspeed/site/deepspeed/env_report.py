"""deepspeed.env_report: what `deepspeed` is here, and what this machine has."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.as_deepspeed.commands.report": ["cli_main", "main"],
    },
)

if __name__ == "__main__":
    __getattr__("cli_main")()
