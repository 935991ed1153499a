"""Sizes known at run time: what follows from what, and their bounds."""
