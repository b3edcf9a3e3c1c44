"""Which state lies in which tier of memory."""
