"""Models built, filled and cut into units with memory."""
