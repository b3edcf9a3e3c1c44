"""The optimizer's step on the host, block by block."""
