"""What a run needs, as arithmetic: memory by tier, bytes moved and shortest times. Allocates and measures nothing."""
