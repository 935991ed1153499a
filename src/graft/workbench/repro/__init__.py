"""One match of a run as a file that runs by itself."""
