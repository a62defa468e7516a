"""Experiments against a baseline: the lab's folder, its ledger, equal time, verdicts."""
