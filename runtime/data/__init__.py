"""Which samples a rank sees, and when."""
