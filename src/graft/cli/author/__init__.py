"""Verbs of somebody who writes a transform: discover, new-transform, check, compare, repro."""
