"""The judge of experiments: candidates run in processes of their own, answer tokens with logits, and are audited."""
