"""Text of a config, JSON or YAML, to a tree with places."""
