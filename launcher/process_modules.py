"""Modules of dsrun that run as processes of their own, by name: who starts one knows no more of it than this.

Each has a `main`. A name is no import, so that a module may start what lies on a higher floor, and what imports torch.
The test of this module imports each of them.
"""

from __future__ import annotations

#: The agent of a host.
AGENT = "dsrun.launcher.agent.main"
#: Names that the agent had in older versions of dsrun: what such an agent left behind is still recognised.
AGENT_BEFORE = ("dsrun.launcher.agent",)
#: The process that imports torch once and forks the ranks of a host.
SPAWNER = "dsrun.launcher.agent.start.spawner"
#: The first code of a rank that has an interpreter of its own.
BOOTSTRAP = "dsrun.launcher.agent.start.bootstrap"
#: Ends what is left of a job on a host.
LEFTOVERS = "dsrun.launcher.agent.leftovers"
#: Asks the driver what is wrong with GPUs after a rank died of one.
GPU_FAULTS = "dsrun.launcher.agent.watch.gpu_faults"
#: Answers questions about a host.
SURVEY_SERVER = "dsrun.launcher.survey.server"
#: Measures with torch.
TORCH_BENCH = "dsrun.launcher.bench.torch_child"
#: The size of a script's model, for `dsrun plan`.
DESCRIBE_MODEL = "dsrun.runtime.engine.compose.describe"
#: Another tool's checkpoint into one of dsrun's.
CONVERT_CHECKPOINT = "dsrun.runtime.checkpoint.convert.main"
#: A safetensors file into a file of torch.
EXPORT_TORCH_FILE = "dsrun.runtime.checkpoint.export.torch_file"
#: Gives a job's scalars to one tracker.
MONITOR = "dsrun.launcher.monitors.main"
