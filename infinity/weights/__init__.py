"""Where the values of a model come from: files, constructors that run without memory, and adapters."""
