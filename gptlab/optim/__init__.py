"""How weights change: orthogonalization, Muon, AdamW, roles -> groups, schedules as functions of progress."""
