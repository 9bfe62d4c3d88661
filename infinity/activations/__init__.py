"""Tensors that autograd saves in a forward: moved, divided among ranks, or recomputed."""
