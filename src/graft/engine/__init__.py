"""The engine: requests, batches, steps, and the LLM front."""
