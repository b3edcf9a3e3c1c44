"""Other tools' checkpoints into dsrun's, and what DeepSpeed's tools make of both."""
