"""State of a graph: which nodes share memory, what is written in place, what must be copied."""
