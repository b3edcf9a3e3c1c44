"""Records on drives, and the memory in front of them."""
