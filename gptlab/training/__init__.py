"""The training loop, one step, and everything that changes during a run."""
