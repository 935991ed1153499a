"""The native backend: a graph as one C++ function for the whole step, compiled on this machine."""
