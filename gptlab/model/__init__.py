"""One GPT made of chosen parts, its attention kernels, and what it costs."""
