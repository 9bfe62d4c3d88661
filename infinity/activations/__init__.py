"""What autograd saves in a forward: moved, divided among ranks, or computed once more."""
