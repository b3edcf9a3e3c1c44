"""What an engine offers under DeepSpeed's names."""
