"""An engine under load: what it gave, how long answers took, and where the time went."""
