"""Where a run happens: device, dtype, peak FLOP/s, threads, RNG, run directory, console and metric files."""
