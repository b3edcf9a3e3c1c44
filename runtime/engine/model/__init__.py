"""An engine's model: what became of its parameters, whether it is still so, and whose it is."""
