"""The public front: compile, torch.compile backend, passes for Inductor, saved artifacts."""
