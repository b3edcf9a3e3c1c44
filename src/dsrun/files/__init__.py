"""Files that are whole, private and regular."""
