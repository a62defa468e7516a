"""docs/lineages.md is true: what it names exists, and each behaviour has a test or is said not to be there.

Where a behaviour is said to be the same, defects in tests/mutations/ break it, and the tests that the row names notice:
here that the list has them, and fits the code; `make test-mutations` makes each defect and runs its tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

from mutations import MUTATIONS, Mutation
from mutations.mutation import file_of_test

from gptlab.app.run.run_request import TrainArguments
from gptlab.config.load import leaf_fields
from gptlab.config.recipes import OWN_TYPES, RECIPES
from gptlab.config.run import RunConfig
from gptlab.data.corpus.known_corpora import named_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lineages.md").read_text(encoding="utf-8")
DOCUMENTS = ("nanoGPT's training loop", "How nanoGPT's train.py works", "modded-nanogpt", "autoresearch", "nanochat")
FIELDS = {*leaf_fields(RunConfig), *(field.name for field in fields(TrainArguments)), "from", "data"} | set(OWN_TYPES)

Row = tuple[str, str, str]


def rows(text: str) -> list[Row]:
    """Behaviour, where it is, its tests, of every table with these three columns."""
    found = []
    for table in re.findall(
        r"^\| behaviour \| in gptlab \| test \|\n\| --- \| --- \| --- \|\n((?:\|.*\n)+)", text, re.M
    ):
        for line in table.splitlines():
            cells = tuple(cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" |"))
            assert len(cells) == 3, line
            found.append(cells)
    return found


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@cache
def names_in(file: str) -> frozenset[str]:
    """Names as pytest has them after FILE::, without parameters."""
    names, group = set(), ""
    source = file_of_test(file).read_text(encoding="utf-8")
    for kind, indent, name in re.findall(r"^(?:(class)|( {4})?def) (\w+)", source, re.M):
        if kind:
            group = name
        elif name.startswith("test"):
            names.add(f"{group}::{name}" if indent else name)
    return frozenset(names)


ROWS = rows(PAGE)
UNPROVEN = {
    "test_loader.py::test_on_a_gpu_the_steps_are_those_of_the_cpu",  # skipped on machines without one
    "test_hub.py::test_a_cut_connection_goes_on_where_it_stopped",  # huggingface_hub does that
}
"""Tests of rows that are the same without a mutation under which they would be seen to fail."""
SAME = [row for row in ROWS if not re.search(r"\*\*(Instead|instead|Not)", row[1])]


def test_every_document_has_its_table() -> None:
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M))
    for document in DOCUMENTS:
        (section,) = [text for heading, text in sections.items() if heading.startswith(document)]
        assert len(rows(section)) > 15, document
    assert sum(len(rows(section)) for section in sections.values()) == len(ROWS)


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    return file_of_test(file).is_file() and test in names_in(file)


def test_tests_exist_or_it_is_said_not_to_be_there() -> None:
    problems = []
    for behaviour, place, tests in ROWS:
        names = in_code(tests)
        if not re.fullmatch(r"(`[^`]+`(, )?)*", tests) or len(set(names)) != len(names):
            problems.append(f"{behaviour}: not a list of different tests: {tests}")
        if not names and not place.startswith("**Not"):
            problems.append(f"{behaviour}: no test")
        problems += [f"{behaviour}: there is no {name}" for name in names if not exists(name)]
    assert problems == []


def test_what_is_the_same_has_tests_that_would_notice() -> None:
    """Each test of a row fails under a mutation that breaks this very row."""
    problems = []
    for behaviour, _, tests in SAME:
        breaking = [mutation for mutation in MUTATIONS if any(behaviour.startswith(start) for start in mutation.rows)]
        if not breaking:
            problems.append(f"no mutation breaks: {behaviour}")
        unproven = set(in_code(tests)) - {test for mutation in breaking for test in mutation.tests} - UNPROVEN
        problems += [f"{behaviour}: no mutation for {name}" for name in sorted(unproven)]
    assert problems == []


def misfits(mutation: Mutation) -> Iterator[str]:
    """What keeps a mutation from being made in the code, or from breaking its rows of the page."""
    if mutation.occurrences() != 1:
        yield f"its text is {mutation.occurrences()} times in {mutation.file}"
    if not mutation.tests:
        yield "no test is named"
    yield from (f"there is no {name}" for name in mutation.tests if not exists(name))
    for start in mutation.rows:
        tests = {name for row in ROWS if row[0].startswith(start) for name in in_code(row[2])}
        if not tests & set(mutation.tests):
            yield f"no row begins with this and has one of its tests: {start}"


def not_python(file: str, mutations: Sequence[Mutation]) -> list[str]:
    """Defects with which the file is not Python. Those that lie apart are made together, and alone where that fails."""
    original, problems = (ROOT / "gptlab" / file).read_text(encoding="utf-8"), []
    while mutations:
        source, made = original, []
        for mutation in mutations:
            if source.count(mutation.old) == 1:
                source = source.replace(mutation.old, mutation.new)
                made.append(mutation)
        if not parses(source):
            problems += [one.defect for one in made if not parses(original.replace(one.old, one.new))]
        mutations = [mutation for mutation in mutations if mutation not in made]
    return problems


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def test_mutations_fit_the_code_and_the_page() -> None:
    assert [f"{mutation.defect}: {problem}" for mutation in MUTATIONS for problem in misfits(mutation)] == []
    for file in {mutation.file for mutation in MUTATIONS if mutation.file.endswith(".py")}:
        assert not_python(file, [mutation for mutation in MUTATIONS if mutation.file == file]) == []


def test_mutations_have_names_of_their_own() -> None:
    assert len({mutation.defect for mutation in MUTATIONS}) == len(MUTATIONS)


def test_files_exist() -> None:
    named = [word for word in in_code(PAGE) if re.match(r"(gptlab|docs|tests)/.*\.\w+$", word) and "::" not in word]
    assert len(named) > 30
    for name in named:
        assert (ROOT / name).is_file(), name


def test_fields_and_flags_exist() -> None:
    """Those of the second column: the first speaks of other programs. test_docs.py reads the commands themselves."""
    groups = {name.partition(".")[0] for name in FIELDS if "." in name}
    for _, place, _ in ROWS:
        for words in in_code(place):
            if re.fullmatch(r"[a-z]+\.[a-z_0-9.]+", words) and words.partition(".")[0] in groups:
                assert words in FIELDS, words
            if words.startswith("--"):
                assert words.split()[0].removeprefix("--").replace("-", "_") in FIELDS, words


def test_recipes_and_corpora_exist() -> None:
    lineages = [
        name for name in RECIPES if not name.endswith("-tiny") and name not in ("quickstart", "shakespeare-char")
    ]
    first_table = PAGE.partition("\n## ")[0]
    for name in lineages:
        assert re.search(rf"`gptlab train {name}[ `]", first_table), name
    corpora = {source for name in lineages for source in RECIPES[name]().data.source}
    assert corpora <= set(in_code(first_table))
    assert all(named_source(name) for name in corpora)


def test_a_wrong_page_would_be_noticed() -> None:
    head = "| behaviour | in gptlab | test |\n| --- | --- | --- |\n"
    page = head + "| a | `b.c` | `test_muon.py::test_x`, `y` |\n| d | **Not yet** | |\n"
    assert rows(page) == [("a", "`b.c`", "`test_muon.py::test_x`, `y`"), ("d", "**Not yet**", "")]
    assert "test_cautious_mask" in names_in("test_muon.py")
    assert "TestEnd::test_evaluation_only" in names_in("test_train.py")
    assert not {"test_x", "random"} & names_in("test_muon.py")
    fits, breaks = (Mutation(defect, "__main__.py", "entry_point()", defect, ["x"]) for defect in ("pass", "pass)"))
    assert not_python("__main__.py", [fits, breaks]) == ["pass)"]
