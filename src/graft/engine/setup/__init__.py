"""From a checkpoint to the parts of an LLM: load, capture, transform, lower, build, check."""
