"""Messages between two ranks of one axis."""
