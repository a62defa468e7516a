"""What this machine does with a run: peak, tokens/s, time of each part, memory."""
