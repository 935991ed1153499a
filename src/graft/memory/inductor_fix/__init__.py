"""Mutations that Inductor would lose: found, put back, or refused."""
