"""What of training lies outside the device, how it comes and goes, and the optimizer's step on the host."""
