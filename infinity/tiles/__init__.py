"""Large weights that are cut into tiles, and the products with them."""
