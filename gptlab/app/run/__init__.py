"""One run, from what was asked for to its end; trained runs loaded again."""
