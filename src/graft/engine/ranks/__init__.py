"""An engine on several ranks: rank 0 schedules and samples, the others run the same steps on their parts."""
