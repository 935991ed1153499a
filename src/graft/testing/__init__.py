"""Kits for testing transforms."""
