"""What `graft new-transform` writes."""
