"""dsrun's weights as files for other programs."""
