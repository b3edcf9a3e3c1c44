"""What the agent finds out about its ranks: progress, stacks, dumps, killed for memory, GPUs at fault."""
