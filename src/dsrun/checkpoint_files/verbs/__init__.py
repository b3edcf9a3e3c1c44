"""Verbs over whole checkpoints: compare, export."""
