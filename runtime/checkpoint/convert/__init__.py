"""Other tools' checkpoints into dsrun's."""
