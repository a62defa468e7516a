"""How several processes share a step."""
