"""The start of a rank: the spawner, the process of the rank, and its first steps."""
