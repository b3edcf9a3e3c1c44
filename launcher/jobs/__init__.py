"""A job's folder, record, lock and list."""
