"""Whether all ranks mean the same, and whether all of them succeeded."""
