"""What lets a long sequence fit: a loss without whole logits, an MLP tile by tile, attention by its kernels' memory."""
