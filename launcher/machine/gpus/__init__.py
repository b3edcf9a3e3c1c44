"""GPUs of this machine, as their driver and the kernel show them."""
