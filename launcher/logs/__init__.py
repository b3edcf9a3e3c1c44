"""Bytes of ranks to complete files and whole lines, and back."""
