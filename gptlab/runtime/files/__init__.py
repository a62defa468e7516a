"""Durable writes, strict JSON, append-only files, tensor files, readers for untrusted files, the cache."""
