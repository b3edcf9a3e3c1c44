"""A vocabulary that is cut over ranks: which tokens each has, and the loss over all of them."""
