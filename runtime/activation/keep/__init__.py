"""Places for tensors between forward and backward."""
