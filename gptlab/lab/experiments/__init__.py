"""Experiments against a baseline: the lab's folder, its ledger, equal time, verdicts, and whole nights of them."""
