"""`gptlab dash`: the runs of a folder as a live page, and a model to talk to (docs/contracts.md)."""
