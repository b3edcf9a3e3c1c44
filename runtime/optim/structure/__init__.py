"""Optimizers that know the tensors behind their flat leaves."""
