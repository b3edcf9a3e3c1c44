"""What scripts/gpu_check runs on a machine with a GPU: one module a part, each a process of its own."""
