"""The live page of runs."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = [
    Mutation(
        "a site that gives its name the address 127.0.0.1 is answered", "report/dashboard/guard.py",
        'if len(values["Host"]) != 1 or values["Host"][0].lower() not in hosts:', 'if len(values["Host"]) != 1:',
        ["test_guard.py::test_other_hosts_are_refused", "test_server.py::test_other_sites_are_refused_everywhere"],
    ),
    Mutation(
        "prompts need no token", "report/dashboard/guard.py",
        "given = headers.get_all(TOKEN_HEADER) or []", "given = [token]",
        ["test_guard.py::test_what_computes_needs_the_token"],
    ),
    Mutation(
        "a resumed run that has passed its old end is read on from there", "report/dashboard/tail.py",
        "or file.read(len(self._anchor)) != self._anchor:", "or not file.read(len(self._anchor)):",
        ["test_tail.py::test_a_file_that_grew_past_its_old_size_after_it_was_truncated_is_read_again"],
    ),
    Mutation(
        "a prompt whose page was closed keeps the model", "report/dashboard/model_process.py",
        "            self._turn.release()\n\n    def close", "            pass\n\n    def close",
        ["test_model_process.py::test_an_answer_that_nobody_reads_ends"],
    ),
    Mutation(
        "runs on other data are grouped as seeds of one configuration", "report/dashboard/watched_run.py",
        'record.get("own_parts"), data))', 'record.get("own_parts"), None))',
        ["test_index.py::TestRow::test_runs_on_other_data_or_with_own_parts_have_another_group"],
    ),
    Mutation(
        "what the reader opened closes when the run trains on", "report/dashboard/assets/details.js",
        'el("details", { open, ', 'el("details", { ',
        ["test_pages.py::test_what_the_reader_opened_and_chose_stays_while_a_run_trains"],
    ),
    Mutation(
        "groups are in the order of their luckiest seeds", "report/dashboard/assets/filter.js",
        "others.length ? mean(finishedBpb(group.rows)) : first.val_bpb", "first.val_bpb",
        ["test_pages.py::test_groups_are_in_the_order_of_their_means"],
    ),
    Mutation(
        "a run whose run.json is damaged has no numbers in the list", "report/dashboard/watched_run.py",
        "return fields, run.recorded()", "return fields, json_object(run.provenance_path)",
        ["test_index.py::TestRow::test_of_a_run_whose_run_json_is_damaged_or_whose_fields_are_lists"],
    ),
    Mutation(
        "a filter does not find bits per byte as they are shown", "report/dashboard/assets/filter.js",
        "[found, shown].includes(Number(value))", "found === Number(value)",
        ["test_pages.py::test_a_filter_finds_what_is_shown"],
    ),
]  # fmt: skip
