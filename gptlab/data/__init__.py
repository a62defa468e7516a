"""Text in, batches out: corpus -> tokenizer -> token shards -> rows -> loader."""
