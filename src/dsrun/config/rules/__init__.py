"""Rules over several keys of a config."""
