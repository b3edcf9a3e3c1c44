"""deepspeed.launcher.runner: hosts, their slots, and the command."""

from dsrun.as_deepspeed.face import face

__all__, __getattr__, __dir__ = face(
    __name__,
    {
        "dsrun.as_deepspeed.commands.options": ["HOSTFILE as DLTS_HOSTFILE"],
        "dsrun.as_deepspeed.commands.resources": [
            "encode_world_info",
            "fetch_hostfile",
            "parse_inclusion_exclusion",
            "parse_resource_filter",
        ],
        "dsrun.as_deepspeed.commands.runner": ["EXPORT_ENVS", "main"],
        "dsrun.launcher.plan.env_file": ["DEEPSPEED_ENVIRONMENT_NAME"],
    },
)

if __name__ == "__main__":
    __getattr__("main")()
