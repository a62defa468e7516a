"""Process group, collectives, liveness, torchrun restarts."""
