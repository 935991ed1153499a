"""A compiled engine as a folder: written by `graft compile`, and ready to generate without compiling anything."""
