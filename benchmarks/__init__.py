"""Side by side with PyTorch's own, in one run: `make bench`."""
