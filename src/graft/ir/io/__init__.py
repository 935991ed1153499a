"""Graphs as text and JSON, and back."""
