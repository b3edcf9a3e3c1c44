"""The engine: the parts put together, and the step in order."""
