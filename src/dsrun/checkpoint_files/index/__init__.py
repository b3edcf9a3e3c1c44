"""The index of a checkpoint as values."""
