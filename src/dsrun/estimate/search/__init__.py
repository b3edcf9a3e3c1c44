"""Other settings of the same run: layouts that are possible, the fastest that fits, the nearest, and tables of both."""
