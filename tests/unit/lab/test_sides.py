"""Which runs are compared: found by folders and patterns, grouped, refused, warned of."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from gptlab.config.errors import UserError
from gptlab.lab.run_record import RunRecord, read_run
from gptlab.lab.sides import field_differences, find_runs, group_by_seed, require_comparable, warnings_of


def run(path: Path, facts: dict[str, Any] | None = None, bpb: Sequence[float] = (4.0, 2.0), **fields: Any) -> RunRecord:
    """A run with these facts in its run.json too."""
    write_run(path, bpb, **fields)
    if facts:
        record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(record | facts))
    return read_run(path)


class TestFinding:
    def test_folders_folders_of_runs_and_patterns(self, tmp_path: Path) -> None:
        for name in ("base-1", "base-2", "new-1"):
            run(tmp_path / name)
        (tmp_path / "notes").mkdir()
        (tmp_path / "base-notes.txt").touch()

        def names(*words: str) -> list[str]:
            return [found.path.name for found in find_runs([str(tmp_path / word) for word in words])]

        assert names("new-1", "base-2") == ["new-1", "base-2"]
        assert names("base-*") == ["base-1", "base-2"]
        assert names("") == ["base-1", "base-2", "new-1"]
        assert names("base-1", "base-*", "../" + tmp_path.name) == ["base-1", "base-2", "new-1"]

    @pytest.mark.parametrize("word", ["nothing", "no*", "notes", "file.txt", "", "\0"])
    def test_a_word_that_names_no_run(self, tmp_path: Path, word: str) -> None:
        (tmp_path / "notes").mkdir()
        (tmp_path / "file.txt").touch()
        with pytest.raises(UserError, match="there is no run in"):
            find_runs([f"{tmp_path}/{word}"])

    def test_an_exported_model_is_skipped_among_others_and_refused_by_name(self, tmp_path: Path) -> None:
        run(tmp_path / "base-1")
        (tmp_path / "base-exported").mkdir()
        (tmp_path / "base-exported" / "config.json").write_text('{"model_type": "gpt2"}')
        for word in ("", "base-*"):
            assert [found.path.name for found in find_runs([str(tmp_path / word)])] == ["base-1"]
        with pytest.raises(UserError, match="holds a model of transformers, not a run"):
            find_runs([str(tmp_path / "base-exported")])

    def test_a_folder_that_may_not_be_read_is_skipped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run(tmp_path / "run")
        (tmp_path / "lost+found").mkdir()
        listdir = os.listdir

        def refuse(folder: Path) -> list[str]:
            if folder.name == "lost+found":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return listdir(folder)

        monkeypatch.setattr(os, "listdir", refuse)
        for word in ("", "*"):
            assert [found.path.name for found in find_runs([str(tmp_path / word)])] == ["run"]

    def test_a_pattern_in_a_name(self, tmp_path: Path) -> None:
        run(tmp_path / "lr[1]")
        assert len(find_runs([str(tmp_path / "lr[1]")])) == 1


def test_runs_that_differ_by_seed_alone_are_a_side(tmp_path: Path) -> None:
    kinds = [("a", "relu2"), ("b", "gelu"), ("c", "relu2"), ("d", "gelu_tanh"), ("e", "gelu")]
    runs = [run(tmp_path / name, seed=n, model__activation=a, run_dir=name) for n, (name, a) in enumerate(kinds)]
    sides = group_by_seed(runs)
    assert {name: "".join(one.path.name for one in side) for name, side in sides.items()} == {
        "A": "ac", "B": "be", "C": "d",
    }  # fmt: skip
    (difference,) = field_differences(sides)
    assert difference.name == "model.activation"
    assert difference.values == {"A": ["relu2"], "B": ["gelu"], "C": ["gelu_tanh"]}
    with pytest.raises(UserError, match="no two of these runs differ by more than their seed"):
        group_by_seed([runs[0], runs[2]])
    busy = run(tmp_path / "busy", {"threads": 1}, seed=9, runtime__threads=1, run_dir="busy")  # gptlab's own choice
    sides = group_by_seed([*runs, busy])
    assert [one.path.name for one in sides["A"]] == ["a", "c", "busy"]
    assert any("threads differs within A" in warning for warning in warnings_of(sides))
    own = run(tmp_path / "own", {"own_parts": {"optimizer": {"name": "train.sgd", "sha256": None}}}, run_dir="own")
    assert [[one.path.name for one in side] for side in group_by_seed([runs[0], own]).values()] == [["a"], ["own"]]
    closures = [
        run(tmp_path / d, {"own_parts": {"optimizer": {"name": "train.sgd", "sha256": d * 64}}}, run_dir=d)
        for d in "01"
    ]
    assert [[one.path.name for one in side] for side in group_by_seed(closures).values()] == [["0"], ["1"]]
    with pytest.raises(UserError, match="no two of these runs"):
        group_by_seed(runs[:1])


def test_data_is_known_by_its_fingerprint_and_else_by_its_name(tmp_path: Path) -> None:
    one, again = (run(tmp_path / name, seed=n, data__source=(name,)) for n, name in enumerate(("notes", "notes-again")))
    other = run(tmp_path / "other", {"data_fingerprint": "e" * 64}, data__source=("notes",))
    sides = group_by_seed([one, again, other])
    assert {name: [*side] for name, side in sides.items()} == {"A": [one, again], "B": [other]}
    assert not any("differ by more than their seed" in warning for warning in warnings_of(sides))
    unknown = [run(tmp_path / d, {"data_fingerprint": None}, data__source=(d,)) for d in "01"]
    assert len(group_by_seed(unknown)) == 2


def test_fields_that_vary_in_the_same_way_on_both_sides_do_not_differ(tmp_path: Path) -> None:
    sides = {
        name: [run(tmp_path / f"{name}{n}", model__n_layer=n, model__bias=bias) for n in order]
        for name, bias, order in (("A", True, (2, 1)), ("B", False, (1, 2)))
    }
    assert [(one.name, one.values) for one in field_differences(sides)] == [("model.bias", {"A": [True], "B": [False]})]


A = {"data_fingerprint": "1" * 24, "tokenizer_fingerprint": "t" * 24}
OTHER_DATA = A | {"data_fingerprint": "2" * 24}
OTHER_TOKENIZER = {"data_fingerprint": "3" * 24, "tokenizer_fingerprint": "u" * 24}
VAL = {"data__val_source": ("diary",)}


class TestComparable:
    """Whether two runs validated on the same text, by what their folders say."""

    @staticmethod
    def check(folder: Path, facts: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> None:
        sides = {"A": [run(folder / "a", A, **a)], "B": [run(folder / "b", facts, **b)]}
        require_comparable(sides)

    @pytest.mark.parametrize(
        ("facts", "a", "b"),
        [
            (A, {}, {"model__seq_len": 256}),
            (A, {"data__source": ("notes",)}, {"data__source": ("notes/",)}),  # the same content
            (OTHER_TOKENIZER, {}, {"tokenizer__vocab_size": 512}),
            (OTHER_DATA, VAL, {**VAL, "data__source": ("books",)}),
            (OTHER_TOKENIZER, VAL, {**VAL, "data__source": ("books",)}),
            ({"data_fingerprint": None}, {}, {}),  # an older run
        ],
        ids=["same", "another spelling", "another tokenizer", "other training text", "both", "unknown"],
    )
    def test_the_same_text(self, tmp_path: Path, facts: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> None:
        self.check(tmp_path, facts, a, b)

    @pytest.mark.parametrize(
        ("facts", "a", "b", "reason"),
        [
            (OTHER_DATA, {}, {}, "no field explains"),
            (OTHER_DATA, {}, {"tokenizer__vocab_size": 512}, "no field explains"),
            (OTHER_DATA, VAL, VAL, "no field explains"),
            (OTHER_TOKENIZER, {}, {"model__vocab_size": 300}, "no field explains"),  # trained on a corpus that grew
            (OTHER_DATA, {}, {"data__source": ("books",)}, "data.source is"),
            (OTHER_TOKENIZER, {}, {"data__val_fraction": 0.1}, "data.val_fraction is 0.05 and 0.1"),
            (OTHER_TOKENIZER, VAL, {"data__val_source": ("books",)}, "data.val_source is"),
            (OTHER_TOKENIZER, {"eval__tokens": 9}, {"eval__tokens": 9}, "their tokenizers differ.*eval.tokens none"),
            ({"data_fingerprint": None}, {}, {"data__split": "tail"}, "data.split is"),
            ({}, {"eval__tokens": 9}, {"eval__tokens": 9}, "run.json of .*b does not say with which tokenizer"),
            (A, {"eval__tokens": 9}, {"eval__tokens": 8}, "different amounts of text: eval.tokens is 9 and 8"),
        ],
    )
    def test_other_text(
        self, tmp_path: Path, facts: dict[str, Any], a: dict[str, Any], b: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(UserError, match=rf"a and .*b cannot be compared: .*{reason}"):
            self.check(tmp_path, facts, a, b)

    def test_a_validation_text_that_one_side_alone_names(self, tmp_path: Path) -> None:
        sides = {"A": [run(tmp_path / "a", A)], "B": [run(tmp_path / "b", OTHER_TOKENIZER, **VAL)]}
        for order in (sides, {"A": sides["B"], "B": sides["A"]}):
            with pytest.raises(UserError, match=r"their validation text may differ, since data\.val_source is"):
                require_comparable(order)

    def test_rows_by_which_documents_of_foreign_tokens_validate(self, tmp_path: Path) -> None:
        packed = run(tmp_path / "a", A, data__rows="packed")
        for name, facts, told in (("b", OTHER_DATA, True), ("c", A, False), ("d", OTHER_TOKENIZER, False)):
            sides = {"A": [packed], "B": [run(tmp_path / name, facts, data__rows="random")]}
            assert any("validate each document by itself" in line for line in warnings_of(sides)) == told

    def test_a_first_run_that_could_be_compared_with_both(self, tmp_path: Path) -> None:
        """Its tokenizer explains other data, to each of the others; nothing explains it between these."""
        first = run(tmp_path / "a", A)
        second, third = (
            run(tmp_path / name, OTHER_TOKENIZER | {"data_fingerprint": name * 24}, tokenizer__vocab_size=512)
            for name in "bc"
        )
        for other in (second, third):
            require_comparable({"A": [first], "B": [other]})
        with pytest.raises(UserError, match=r"b and .*c cannot be compared: no field explains"):
            require_comparable({"A": [first], "B": [second], "C": [third]})

    def test_a_run_on_two_sides(self, tmp_path: Path) -> None:
        one = run(tmp_path / "a")
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        for other in (one, read_run(tmp_path / "copy")):
            with pytest.raises(UserError, match="is on two sides, A and B"):
                require_comparable({"A": [one], "B": [other]})

    def test_a_copy_that_trained_on_is_another_run(self, tmp_path: Path) -> None:
        one, longer, later = (
            run(tmp_path / name, {"run_id": "1"}, bpb=bpb, horizon__amount=amount)
            for name, bpb, amount in (("a", [4.0, 2.0], 9), ("longer", [4.0, 2.0], 20), ("later", [4.0, 2.0, 1.0], 9))
        )
        for other in (longer, later):
            require_comparable({"A": [one], "B": [other]})

    def test_a_run_that_never_validated(self, tmp_path: Path) -> None:
        a, b = run(tmp_path / "a"), run(tmp_path / "b", status="running")
        (b.path / "metrics.jsonl").unlink()
        with pytest.raises(UserError, match="b has no validation to compare"):
            require_comparable({"A": [a], "B": [b]})

    @pytest.mark.parametrize("sides", [{}, {"A": []}, {"A": [], "B": []}])
    def test_nothing_to_compare(self, sides: dict[str, list[RunRecord]]) -> None:
        with pytest.raises(UserError, match="needs two sides"):
            require_comparable(sides)


class TestWarnings:
    def test_none_where_only_fields_and_seeds_differ(self, tmp_path: Path) -> None:
        runs = [run(tmp_path / f"{n}", seed=n % 2, model__bias=n < 2) for n in range(4)]
        assert warnings_of({"A": runs[:2], "B": runs[2:]}) == []

    @pytest.mark.parametrize(
        ("fact", "values", "words"),
        [
            (
                "code_fingerprint",
                ("c" * 64, "d" * 64),
                "the code differs between the sides: A cccccccccccc; B dddddddddddd",
            ),
            ("implementations", ({"kernels": "none"}, {"kernels": "12"}), "the library of C++ kernels differs"),
            ("device", ("cpu", "cuda:0"), "the device differs between the sides: A cpu; B cuda:0"),
            ("threads", (1, 2), "the number of threads differs between the sides: A 1; B 2"),
            ("threads", (1, None), "the number of threads differs between the sides: A 1; B unknown"),
            ("data_fingerprint", ("1", "2"), "the data (its fingerprint covers"),
            (
                "own_parts",
                (None, {"optimizer": {"name": "train.sgd", "sha256": None}}),
                "a Python caller's own parts differs between the sides: A none; B optimizer=train.sgd",
            ),
            ("resumes", ([], [{"threads": 3}]), "the number of threads differs between the sides: A 1; B [1, 3]"),
        ],
    )
    def test_facts(self, tmp_path: Path, fact: str, values: tuple[Any, Any], words: str) -> None:
        a, b = (run(tmp_path / f"{n}", {"threads": 1, fact: value}) for n, value in enumerate(values))
        (warning,) = warnings_of({"A": [a], "B": [b]})
        assert warning.startswith(words)

    def test_within_a_side(self, tmp_path: Path) -> None:
        runs = [run(tmp_path / f"{n}", {"device": device}, seed=n) for n, device in enumerate(("cpu", "mps", "cpu"))]
        assert warnings_of({"A": runs[:2], "B": runs[2:]}) == ["the device differs within A: A cpu, mps; B cpu"]

    def test_runs(self, tmp_path: Path) -> None:
        killed = run(tmp_path / "killed", status="running", seed=1)
        changes = [{"step": 5, "fields": {"horizon.amount": [5, 10]}}]
        longer = run(tmp_path / "longer", {"config_changes": changes}, seed=2)
        fewer_rows = [{"step": 0, "fields": {"batch.micro_sequences": [8, 4]}}, {"fields": 3}, 4]
        again = run(tmp_path / "again", {"config_changes": fewer_rows}, seed=2)
        lost = run(tmp_path / "lost", seed=3, model__bias=True)
        (lost.path / "run.json").unlink()
        warnings = " | ".join(warnings_of({"A": [killed, longer, again], "B": [read_run(lost.path)]}))
        for words in (
            "killed has not finished (its status is running): it last validated at step 10",
            "longer has another length than it started with",
            "A: 2 runs have seed 2; their mean counts as one value",
            "lost has no run.json that can be read",
        ):
            assert words in warnings
        assert "again has another length" not in warnings

    def test_fields_within_a_side(self, tmp_path: Path) -> None:
        runs = [run(tmp_path / f"{n}", seed=n, model__bias=n == 1) for n in range(3)]
        expected = "the runs of A differ by more than their seed: in model.bias"
        assert expected in warnings_of({"A": runs[:2], "B": runs[2:]})
        sizes = [run(tmp_path / f"size{n}", model__n_layer=n, model__bias=n == 1) for n in (1, 2)]
        assert warnings_of({"A": sizes, "B": runs[2:]}) == []  # other sizes may need other fields
