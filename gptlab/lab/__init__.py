"""Many runs: statistics, comparison, sweeps, and the judge of experiments."""
