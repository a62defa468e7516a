"""Text to ids and back, with exact bytes: bytes, characters, BPE, GPT-2."""
