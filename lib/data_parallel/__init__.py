"""Every rank holds the whole model and its own rows of the batch; gradients are averaged."""
