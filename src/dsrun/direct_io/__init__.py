"""Files of named extents, moved past the page cache by threads. Standard library and xxhash only; knows no tensors."""
