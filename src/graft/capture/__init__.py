"""nn.Module → canonical graph."""
