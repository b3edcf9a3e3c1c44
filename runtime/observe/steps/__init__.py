"""What an optimizer step took on a rank, and on all of them."""
