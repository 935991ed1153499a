"""Spelled-out attention: how fuse_attention reads it."""
