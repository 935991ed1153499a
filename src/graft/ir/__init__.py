"""Everything that reads or edits FX graphs."""
