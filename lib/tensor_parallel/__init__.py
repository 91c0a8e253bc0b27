"""Every rank has a part of each weight matrix and works on the same rows; activations are summed or put together."""
