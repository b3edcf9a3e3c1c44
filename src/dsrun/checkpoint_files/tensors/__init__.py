"""Tensors in safetensors files, and formats of their elements."""
