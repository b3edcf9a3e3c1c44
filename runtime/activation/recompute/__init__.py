"""Calls that run again in backward."""
