"""Where each element of a tensor lives: pure arithmetic, no process group."""
