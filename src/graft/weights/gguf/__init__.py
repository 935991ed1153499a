"""Reading GGUF files."""
