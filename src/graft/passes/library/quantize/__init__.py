"""Linear layers with quantized weights."""
