"""What every package needs and none owns: errors, atomic files, timers, progress, device memory."""
