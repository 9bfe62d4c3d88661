"""Integrations with trainers of other libraries, one module per library. `import infinity` does not
import them."""
