"""GPUs that a job takes, and GPUs that each of its ranks sees."""
