"""TrainState, one optimizer step, the loop, checkpoints, throughput."""
