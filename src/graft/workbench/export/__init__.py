"""A run for other tools: a trace for Perfetto, a graph for Model Explorer, a program that torch and Netron open."""
