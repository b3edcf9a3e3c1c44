"""Copies of the training state in hosts' memory."""
