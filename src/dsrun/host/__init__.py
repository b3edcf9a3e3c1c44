"""Memory and accelerators of this host, read from files of the kernel."""
