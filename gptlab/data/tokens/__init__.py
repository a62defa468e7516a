"""Token ids on disk, gptlab's and other programs'."""
