"""Device, dtype, peak FLOP/s, threads, memory, determinism, random generators."""
