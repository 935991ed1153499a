"""Timings, the roofline bounds that they are held against, and the baselines measured beside graft."""
