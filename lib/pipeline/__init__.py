"""Every rank has some of the layers; microbatches pass through them in an order that is plain data."""
