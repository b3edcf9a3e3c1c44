"""Choices that a run and the plan of a run make alike."""
