"""Makes each mutation of the list in a copy of gptlab, and runs the tests that must fail then.

    python -m tests.mutations [WORD ...] [--processes N]

Of several words, a mutation is taken where one of them is in its defect, file or tests. Exit code 1 where a mutation
survives or its text is not found exactly once, or where a test fails, or does not run, without any mutation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import MUTATIONS
from .forked_tests import LIMIT_SECONDS, Outcome, Run, Tree, import_libraries
from .mutation import Mutation


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutations with one of these in them")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many at a time (default 1)")
    arguments = parser.parse_args(argv)
    mutations = [m for m in MUTATIONS if not arguments.words or any(w in _text(m) for w in arguments.words)]
    if not mutations:
        parser.error("no mutation has one of these words")
    started = time.monotonic()
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="gptlab-mutations-") as folder:
        trees = [Tree(Path(folder) / str(number)) for number in range(arguments.processes)]
        sound = tests_without_mutation(mutations, trees)
        results = Counter(try_mutations(mutations, sound, trees))
    print(
        f"{results['caught']} of {len(mutations)} mutations caught, "
        f"{', '.join(f'{count} {verdict}' for verdict, count in results.items() if verdict != 'caught') or 'all'}; "
        f"{len(sound)} tests; {time.monotonic() - started:.0f} s"
    )
    return 0 if results["caught"] == len(mutations) else 1


def tests_without_mutation(mutations: Sequence[Mutation], trees: Sequence[Tree]) -> dict[str, Outcome]:
    """How each test that is named ends on gptlab as it is."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))  # the tests of one share their fixtures
    shares = [
        [test for test in tests if test.partition("::")[0] in files[number :: len(trees)]]
        for number in range(len(trees))
    ]
    runs = [Run.start(tree, share, keep_bytecode=True) for tree, share in zip(trees, shares, strict=True) if share]
    outcomes: dict[str, Outcome] = {}
    for run in runs:
        outcomes |= run.wait(LIMIT_SECONDS * len(run.tests))
        if any(outcomes[test] != "passed" for test in run.tests):
            print(_tail(run.log))
    for test, outcome in outcomes.items():
        if outcome != "passed":
            print(f"{outcome} without any mutation: {test}")
    return outcomes


def try_mutations(mutations: Sequence[Mutation], sound: dict[str, Outcome], trees: Sequence[Tree]) -> list[str]:
    """The verdict on each, which is printed too."""
    verdicts: list[str] = []
    waiting, free, running = list(mutations), list(trees), list[tuple[Mutation, Run]]()

    def tell(mutation: Mutation, verdict: str, detail: str = "") -> None:
        verdicts.append(verdict)
        print(f"{verdict:9} {mutation.file}: {mutation.defect}{detail}", flush=True)

    while waiting or running:
        while waiting and free:
            mutation, tree = waiting.pop(0), free[-1]
            if (count := mutation.occurrences(tree.folder)) != 1:
                tell(mutation, "stale", f" (the old text occurs {count} times)")
            elif unsound := [test for test in mutation.tests if sound[test] != "passed"]:
                tell(mutation, "unproven", f" ({unsound[0]}: {sound[unsound[0]]} without it)")
            else:
                free.pop()
                tree.mutate(mutation)
                running.append((mutation, Run.start(tree, mutation.tests)))
        if not running:
            continue
        # The first that is done, or the oldest where none is.
        place = next((i for i, (_, run) in enumerate(running) if not run.process.is_alive()), None)
        if place is None and len(running) > 1 and time.monotonic() - running[0][1].started < LIMIT_SECONDS:
            time.sleep(0.05)
            continue
        mutation, run = running.pop(place or 0)
        outcomes = run.wait(LIMIT_SECONDS)
        run.tree.restore()
        free.append(run.tree)
        alive = [test for test, outcome in outcomes.items() if outcome in ("passed", "skipped")]
        broken = [test for test, outcome in outcomes.items() if outcome == "not run"]
        if alive:
            tell(mutation, "SURVIVED", f" ({', '.join(alive)})")
        elif broken:
            tell(mutation, "unproven", f" ({broken[0]} did not run: the mutation breaks more than it says)")
            print(_tail(run.log))
        else:
            tell(mutation, "caught", f" ({time.monotonic() - run.started:.1f} s)")
    return verdicts


def _text(mutation: Mutation) -> str:
    return " ".join((mutation.defect, mutation.file, *mutation.tests, *mutation.rows))


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
