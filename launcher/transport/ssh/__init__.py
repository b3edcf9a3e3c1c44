"""Ways over ssh: fabric in this process, and the OpenSSH client of the system."""
