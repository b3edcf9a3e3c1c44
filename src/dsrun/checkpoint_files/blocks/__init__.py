"""Blocks of a checkpoint's files: written with checksums, read and checked."""
