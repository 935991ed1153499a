"""Models: the registry, and loading from folders, GGUF files, the embedded package or random weights."""
