"""Saving and loading state that is cut into boxes."""
