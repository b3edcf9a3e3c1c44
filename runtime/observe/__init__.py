"""Records of what a run did."""
