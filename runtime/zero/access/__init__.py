"""Access to parameters, gradients and states from outside of a step."""
