"""One model on several ranks: which values each computes a part of."""
