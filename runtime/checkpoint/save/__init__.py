"""Saving: from what is asked to what is published."""
