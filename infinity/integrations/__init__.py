"""Trainers of other libraries on this engine, one module for each library. `import infinity` does
not import them."""
