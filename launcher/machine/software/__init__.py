"""Versions of what is installed, and libraries that a program would load."""
