"""Text in, batches out."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    # --- corpora and downloads
    Mutation(
        "climbmix validates on the shard before the last", "data/corpus/known_corpora.py",
        'validation="shard_06542.parquet"', 'validation="shard_06541.parquet"',
        ["test_hub.py::test_the_table_is_whole"],
        ["Text to a tokenizer of 8192 entries"],
    ),
    Mutation(
        "FineWeb-Edu validates on its first shard", "data/corpus/known_corpora.py",
        'validation="shard_01822.parquet"', 'validation="shard_00000.parquet"',
        ["test_hub.py::test_the_table_is_whole"],
        ["The last shard of FineWeb-Edu"],
    ),
    Mutation(
        "files that validate are trained on too", "data/corpus/known_corpora.py",
        "return [path for path in chosen if path not in set(val)], val", "return chosen, val",
        ["test_token_files.py::test_a_corpus_by_name_validates_on_what_its_lineage_does",
         "test_hub.py::test_the_table_is_whole", "test_hub.py::test_a_named_corpus_with_its_validation_file"],
        ["At the end evaluation mode and bits per byte", "The last shard of FineWeb-Edu"],
    ),
    Mutation(
        "a corpus by name holds out a part of its training files", "data/corpus/known_corpora.py",
        "for entry in entries if _validates(entry.place))", "for entry in entries if not _validates(entry.place))",
        ["test_token_files.py::test_a_corpus_by_name_validates_on_what_its_lineage_does",
         "test_hub.py::test_what_validates"],
        ["At the end evaluation mode and bits per byte"],
    ),
    Mutation(
        "what a corpus validates on validates on itself", "data/corpus/known_corpora.py",
        "if (entry := named_source(source)) and not entry.validation]", "if (entry := named_source(source))]",
        ["test_hub.py::test_what_validates"],
    ),
    Mutation(
        "files are downloaded one after the other", "data/corpus/hub.py",
        "PARALLEL_FILES = 8", "PARALLEL_FILES = 1",
        ["test_hub.py::test_all_files_come_from_one_commit_in_parallel"],
        ["Shards are downloaded in parallel"],
    ),
    Mutation(
        "files that are there are asked for again", "data/corpus/hub.py",
        "if record is not None and not _missing(source, record, hub_files, root):", "if False:",
        ["test_hub.py::test_a_second_time_asks_nothing"],
        ["Shards are downloaded in parallel"],
    ),
    Mutation(
        "a server's error ends the download", "data/corpus/hub.py",
        "return status >= 500 or status in (408, 429)", "return status in (408, 429)",
        ["test_hub.py::test_a_busy_server_is_asked_again"],
        ["Shards are downloaded in parallel"],
    ),
    Mutation(
        "a file with other contents than announced is kept", "data/corpus/hub.py",
        "    if found != wanted:\n        contents = path.resolve()",
        "    if False:\n        contents = path.resolve()",
        ["test_hub.py::test_wrong_contents_come_again_and_are_never_kept"],
    ),
    Mutation(
        "a downloaded file that was altered later is believed", "data/corpus/known_corpora.py",
        "if status.st_mtime_ns != known.mtime_ns and file_sha256(path, root).hex() != known.sha256:", "if False:",
        ["test_hub.py::test_a_file_that_is_not_what_was_downloaded_comes_again"],
    ),
    Mutation(
        "a downloaded file that was touched later comes again", "data/corpus/known_corpora.py",
        "known.mtime_ns and file_sha256(path, root).hex() != known.sha256:", "known.mtime_ns:",
        ["test_hub.py::test_fingerprint_is_that_of_the_same_files_in_a_folder"],
    ),
    Mutation(
        "a single file that was renamed is another corpus", "data/corpus/documents.py",
        "if len(source.files) > 1 else", "if source.files else",
        ["test_corpus.py::test_fingerprint_of_a_single_file_follows_how_it_is_read_and_not_its_name"],
    ),
    Mutation(
        "a single file is the same corpus however it is read", "data/corpus/documents.py",
        'f"{file.suffix} {is_packed(file.path)}"', '"the file"',
        ["test_corpus.py::test_fingerprint_of_a_single_file_follows_how_it_is_read_and_not_its_name"],
    ),
    Mutation(
        "JSONL with an integer of many digits is refused", "data/corpus/corpus_files.py",
        "json.JSONDecoder(parse_int=lambda digits: 0)", "json.JSONDecoder()",
        ["test_corpus.py::test_jsonl_may_hold_long_integers"],
    ),
    Mutation(
        "a run in the folder of a corpus is read", "data/corpus/corpus_files.py",
        "if Path(folder) != root and _is_written([*subfolders, *files]):", "if False:",
        ["test_corpus.py::test_runs_and_labs_are_no_part_of_a_corpus"],
    ),
    Mutation(
        "runs that match a glob are read", "data/corpus/corpus_files.py",
        "if written.isdisjoint(path.parents):", "if True:",
        ["test_corpus.py::test_runs_and_labs_are_no_part_of_a_corpus"],
    ),
    Mutation(
        "a glob passes over folders that cannot be listed", "data/corpus/corpus_files.py",
        "_cannot_list(error)  # glob passes over it", "pass",
        ["test_corpus.py::test_a_folder_that_cannot_be_listed_is_refused"],
    ),
    Mutation(
        "of two Parquet columns with one name none is refused", "data/corpus/corpus_files.py",
        "if (n_columns := names.count(column)) > 1:", "if (n_columns := names.count(column)) > 2:",
        ["test_corpus.py::test_two_parquet_columns_of_the_same_name"],
    ),
    # --- tokenizers
    Mutation(
        "half of a character counts as the three bytes of its replacement", "data/tokenizer/base.py",
        "np.array([len(token) for token in self.tokens], dtype=np.int32)",
        'np.array([len(t.decode(errors="replace").encode()) for t in self.tokens], dtype=np.int32)',
        ["test_tokenizer.py::test_every_kind_is_exact_in_bytes"],
        ["The tokenizer's vocabulary and each token's bytes"],
    ),
    Mutation(
        "GPT-2's first 256 ids are the bytes in their order", "data/tokenizer/gpt2.py",
        "byte_order = sorted(range(256), key=byte_characters().__getitem__)",
        "byte_order = list(range(256))",
        ["test_tokenizer_gpt2.py::test_every_id_is_openais"],
        ["12 layers, 12 heads, width 768"],
    ),
    Mutation(
        "each short text is a task of its own", "data/tokenizer/bpe.py",
        "if characters >= TASK_CHARACTERS:", "if characters >= 0:",
        ["test_tokenizer.py::test_short_texts_are_encoded_many_at_a_time"],
    ),
    Mutation(
        "the trainer gets text without blanks in long pieces", "data/tokenizer/bpe.py",
        "PORTION_CHARACTERS = 1 << 11", "PORTION_CHARACTERS = 1 << 16",
        ["test_tokenizer.py::test_the_trainer_gets_no_long_piece"],
    ),
    Mutation(
        "a text is cut before any newline", "data/tokenizer/bpe.py",
        r"\S(?= )|[A-Za-z](?=\n)|", r"\S(?=[ \n])|",
        ["test_tokenizer.py::test_every_line_and_word_can_be_cut_off"],
    ),
    Mutation(
        "a tokenizer learns from the beginning of a text only", "data/tokenizer/bpe.py",
        "owed += share * len(data)", "owed += len(data)",
        ["test_tokenizer.py::test_training_text_is_spread_where_its_size_has_a_limit"],
    ),
    Mutation(
        "the whole of a long text is read for the tokenizer", "data/tokenizer/bpe.py",
        "if total >= most:", "if False:",
        ["test_tokenizer.py::test_training_text_is_spread_where_its_size_has_a_limit"],
    ),
    Mutation(
        "the size of JSONL counts as that of its text", "data/corpus/documents.py",
        "if any(file.suffix in COLUMN_SUFFIXES or is_packed(file.path) for file in files):\n            return None",
        "if False:\n            return None",
        ["test_prepare.py::test_a_tokenizer_learns_from_all_parts_of_a_folder_of_text"],
    ),
    Mutation(
        "files that are no text count as text for the tokenizer", "data/tokenizer/bpe.py",
        "config.train_bytes / max(total, 1)", "config.train_bytes / most_bytes",
        ["test_prepare.py::test_a_tokenizer_learns_from_all_parts_of_a_folder_of_text"],
    ),
    Mutation(
        "all characters of a text become ids at once", "data/tokenizer/base.py",
        "SLICE_CHARACTERS = 1 << 18", "SLICE_CHARACTERS = 1 << 30",
        ["test_tokenizer.py::test_char_encodes_a_long_text_in_little_memory"],
    ),
    Mutation(
        "a tokenizer.json is taken for its folder", "data/tokenizer/tokenizer.py",
        "folder.parent if folder.name == FILE else folder", "folder",
        ["test_tokenizer.py::test_save_and_load",
         "test_cli_data.py::test_a_tokenizer_is_named_by_its_folder_or_file"],
    ),
    # --- order and packing
    Mutation(
        "a piece that does not fit by one token is placed", "data/packing.py",
        "position = bisect_right(in_use, gap - 1) - 1", "position = bisect_right(in_use, gap) - 1",
        ["test_packing.py::test_a_plan_by_hand", "test_packing.py::test_cut_and_pad_place_what_the_oracle_places",
         "test_rows.py::test_a_packed_row_by_hand",
         "test_rows.py::test_packed_rows_hold_what_the_oracle_packs"],
        ["Rows begin with BOS and are packed best-fit", "Text to a tokenizer of 8192 entries"],
    ),
    Mutation(
        "the longest document is cropped instead of the shortest", "data/cropping.py",
        "shortest = -(-keys[0] // _ARRIVALS)", "shortest = -(-keys[-1] // _ARRIVALS)",
        ["test_packing.py::test_crop_places_what_nanochats_loader_places",
         "test_packing.py::test_crop_gives_the_rows_that_nanochats_own_program_gave"],
        ["Rows begin with BOS and are packed best-fit"],
    ),
    Mutation(
        "cropped documents join the buffer one by one", "data/cropping.py",
        "REFILL_DOCUMENTS = 128", "REFILL_DOCUMENTS = 1",
        ["test_packing.py::test_crop_gives_the_rows_that_nanochats_own_program_gave"],
        ["Rows begin with BOS and are packed best-fit"],
    ),
    Mutation(
        "the buffer of cropped documents is empty at each border of parts", "data/cropping.py",
        "self._plan_part(self._buffers[part], PART_DOCUMENTS)",
        "self._plan_part(Buffer(EMPTY.waiting, self._buffers[part].arrived), PART_DOCUMENTS)",
        ["test_packing.py::test_crop_places_what_nanochats_loader_places"],
    ),
    Mutation(
        "of equal documents the last one is placed first", "data/packing.py",
        "item = heappop(waiting[whole])", "item = waiting[whole].pop()",
        ["test_packing.py::test_cut_and_pad_place_what_the_oracle_places"],
    ),
    Mutation(
        "a new epoch has the order of the last one", "data/rows.py",
        "return permuted(indices, self.rows_per_epoch, seed=self.seed, epoch=epoch)",
        "return permuted(indices, self.rows_per_epoch, seed=self.seed, epoch=0)",
        ["test_rows.py::test_rows_are_a_pure_function_of_seed_epoch_and_index"],
    ),
    # --- rows
    Mutation(
        "the target is the input", "data/rows.py",
        "rows = self.split.take(self.starts(epoch, indices)[:, None] + np.arange(self.seq_len + 1))\n"
        "        return rows[:, :-1], rows[:, 1:]",
        "rows = self.split.take(self.starts(epoch, indices)[:, None] + np.arange(self.seq_len))\n"
        "        return rows, rows",
        ["test_rows.py::test_random_rows_are_windows_that_reach_both_ends",
         "test_rows.py::test_sequential_rows_are_chunks_in_file_order"],
        ["The target is the input shifted by one"],
    ),
    Mutation(
        "the last window of a text is never drawn", "data/rows.py",
        "n_starts = self.split.n_tokens - self.seq_len", "n_starts = self.split.n_tokens - self.seq_len - 1",
        ["test_rows.py::test_random_rows_are_windows_that_reach_both_ends"],
    ),
    Mutation(
        "sequential rows leave a token out between two of them", "data/rows.py",
        "return indices * self.seq_len", "return indices * (self.seq_len + 1)",
        ["test_rows.py::test_sequential_rows_are_chunks_in_file_order"],
        ["The training loader is reset"],
    ),
    Mutation(
        "validation rows leave a token out between two of them", "data/rows.py",
        "places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)",
        "places = indices[:, None] * (self.seq_len + 1) + np.arange(self.seq_len + 1)",
        ["test_token_files.py::test_validation_is_the_speedruns",
         "test_rows.py::test_validation_is_fixed_by_content_and_covers_every_token_once"],
        ["Validation every 125 steps"],
    ),
    Mutation(
        "validation takes the whole text, whatever it is limited to", "data/rows.py",
        "limit = split.n_tokens if max_target_tokens is None else max_target_tokens", "limit = split.n_tokens",
        ["test_rows.py::test_validation_is_fixed_by_content_and_covers_every_token_once",
         "test_rows.py::test_validation_by_hand", "test_token_files.py::test_validation_is_the_speedruns"],
        ["Validation every 125 steps"],
    ),
    Mutation(
        "validation follows the order of the files", "data/rows.py",
        'order = np.argsort(split.content_hashes, kind="stable")', "order = np.arange(len(split.content_hashes))",
        ["test_rows.py::test_validation_by_hand",
         "test_rows.py::test_validation_is_fixed_by_content_and_covers_every_token_once"],
    ),
    Mutation(
        "a document of cropped rows counts as often as it comes", "data/token_fate.py",
        "np.maximum.at(longest,", "np.add.at(longest,",
        ["test_rows.py::test_what_is_cropped_is_all_that_no_row_has",
         "test_rows.py::test_the_fate_of_every_packed_token_adds_up"],
    ),
    Mutation(
        "each BOS of cropped rows counts as a target", "data/token_fate.py",
        "np.unique(np.delete(documents, packing.row_segments[:-1]))", "np.unique(documents)",
        ["test_rows.py::test_what_is_cropped_is_all_that_no_row_has"],
    ),
    # --- the loader
    Mutation(
        "a batch is made when it is asked for", "data/loader.py",
        "self._limit = steps_ahead(batch)", "self._limit = 1",
        ["test_loader.py::test_steps_are_made_ahead_by_a_thread_and_not_further_than_they_should"],
        ["The next batch is fetched while"],
    ),
    Mutation(
        "batches for a GPU are not pinned", "data/loader.py",
        'return tensor.pin_memory() if self._device.type == "cuda" else tensor', "return tensor",
        ["test_loader.py::test_batches_for_a_gpu_are_pinned_and_copied_asynchronously"],
    ),
    Mutation(
        "the copy to the GPU waits", "data/loader.py",
        "t.to(self._device, non_blocking=True)", "t.to(self._device)",
        ["test_loader.py::test_batches_for_a_gpu_are_pinned_and_copied_asynchronously"],
    ),
    Mutation(
        "the loader saves how far it has made steps ahead", "data/loader.py",
        'return {"next_step": self._next_step}',
        'return {"next_step": self._next_step + len(self._ahead)}',
        ["test_loader.py::test_the_state_is_that_of_the_last_step_consumed"],
        ["It holds configuration, loop state and the loader's"],
    ),
    Mutation(
        "a rank counts its own targets only", "data/loader.py",
        "int((targets != IGNORED).sum()) if all_here else self._target_tokens(everywhere)",
        "int((targets != IGNORED).sum())",
        ["test_loader.py::test_any_world_size_gets_the_same_steps"],
    ),
    Mutation(
        "an epoch's order takes four rounds", "data/rows.py",
        "FEISTEL_ROUNDS = 6", "FEISTEL_ROUNDS = 4",
        ["test_packing.py::test_the_order_is_six_rounds_of_a_feistel_network",
         "test_packing.py::test_the_order_is_that_of_runs_begun_before"],
    ),
]  # fmt: skip
