"""Where the time of a step goes: kernel by kernel, node by node."""
