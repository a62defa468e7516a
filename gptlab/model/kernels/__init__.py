"""CPU kernels, and which implementation computes."""
