"""The process that writes a rank's file."""
