"""Where the values of a model come from: files, and constructors that run without memory."""
