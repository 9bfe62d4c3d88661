"""Large weights that are cut into tiles, and what computes with them."""
