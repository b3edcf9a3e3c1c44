"""The model that is estimated: units, layers, activations."""
