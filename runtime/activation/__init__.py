"""What forward keeps for backward: recomputed, moved to host memory, packed, cut over ranks, or left as it is."""
