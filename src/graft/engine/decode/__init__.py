"""Decoding as captures on fixed memory: one for each batch size, the next token fed on the device."""
