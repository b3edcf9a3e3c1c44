"""The training runtime: a plain PyTorch model in, a ZeRO-partitioned engine out."""
