"""The parts of the numeric check of a match: what is tried, how it runs, how far off a replacement may be."""
