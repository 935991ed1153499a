"""One normal form: rules that bring every spelling of a graph to it."""
