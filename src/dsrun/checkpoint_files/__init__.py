"""What a checkpoint is on disk: its index, its files, their checksums. Values and bytes; no torch, no numpy."""
