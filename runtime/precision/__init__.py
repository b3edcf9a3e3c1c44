"""Which dtype a tensor has, where."""
