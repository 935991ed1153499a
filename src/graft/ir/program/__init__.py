"""What a captured program reads, writes and returns."""
