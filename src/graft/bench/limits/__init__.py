"""What a machine can do, and what a step must read."""
