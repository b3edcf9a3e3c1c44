"""Where ranks meet, and how hosts that were each started with dsrun find together."""
