"""Scripts and configurations that were written for DeepSpeed."""
