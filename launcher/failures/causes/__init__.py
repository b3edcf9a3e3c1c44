"""Texts that programs print when they fail, and what they mean."""
