"""`gptlab clean`: what the cache and old checkpoints take on the disk, and what of it can be deleted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.cli.runs import confirmed, deleted, disk_text
from gptlab.config.errors import printable
from gptlab.config.fields import NotNegative, checked_dataclass
from gptlab.lab.removals import Removal, judge_leftovers, old_checkpoints, remove
from gptlab.lab.run_list import ListedRun, list_runs
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.files.cache_contents import Item, cache_items, delete_item, paths_in_use
from gptlab.runtime.files.plain_file import to_json
from gptlab.runtime.records.table import table
from gptlab.training.checkpoint.names import step_of

DESCRIPTION = """\
Free disk space: what gptlab makes again by itself (prepared tokens, tokenizers, compiled code, measured rates), what \
killed judges of labs left in the temporary folder, and old checkpoints of finished runs. Shows what would go, and \
asks. Never deletes what a process uses, a run's best or last checkpoint, one that its configuration keeps \
(checkpoint.keep_every_steps), or anything of a lab."""

_MAX_RUNS = 20


@checked_dataclass("--")
class CleanArguments:
    folders: Positional[tuple[str, ...]] = ()
    """Folders that hold runs, at any depth, whose old checkpoints can go. None: runs, if there is one."""
    checkpoints: bool = True
    """Delete old checkpoints too."""
    downloads: bool = False
    """Delete downloaded files too: to get them again needs the network."""
    unused_days: NotNegative[float] = 0.0
    """Of the cache, only what nothing has used for so many days."""
    cache_dir: str | None = None
    """The cache. None: $GPTLAB_CACHE, or the user's cache folder."""
    yes: bool = False
    """Do not ask."""
    json: bool = False
    """Print one JSON object. Nothing is deleted without --yes."""


def main(argv: Sequence[str]) -> int:
    """Exit code 2 where something could not be deleted, 0 also where the answer was no."""
    arguments = parse(CleanArguments, argv, prog="gptlab clean", description=DESCRIPTION)
    root = cache_root(arguments.cache_dir)
    folders = [Path(folder) for folder in arguments.folders or (["runs"] if Path("runs").is_dir() else [])]
    runs = list_runs(folders)
    training = {run.data_fingerprint for run in runs if run.status == "running" and run.data_fingerprint}
    unused_seconds = 86400 * arguments.unused_days
    cached = cache_items(
        root, downloads=arguments.downloads, unused_seconds=unused_seconds, fingerprints=training
    ) + judge_leftovers()  # fmt: skip
    old = old_checkpoints(runs) if arguments.checkpoints else []
    items = [*cached, *_of_checkpoints(runs, old)]
    going = [item for item in cached if item.kept is None]
    if not arguments.json:
        print(printable("\n".join(_lines(root, items, old))))
    freed, problems, done = 0, list[str](), False
    if going or old:
        total = disk_text(sum(item.bytes for item in items if item.kept is None))
        if arguments.yes or (not arguments.json and confirmed(f"delete {total}? [y/N] ")):
            of_cache, kept = deleted(going, partial(delete_item, used=paths_in_use()))
            of_runs, also_kept = deleted(old, remove)
            freed, problems, done = of_cache + of_runs, kept + also_kept, True
    if arguments.json:
        print(to_json({"cache": str(root), "items": [*map(_figures, items)], "deleted": done, "freed_bytes": freed},
                      indent=2))  # fmt: skip
    else:
        print(f"deleted {disk_text(freed)}" if done else "nothing was deleted" if going or old else "nothing to delete")
    for problem in problems:
        print(printable(f"gptlab: error: {problem}"), file=sys.stderr)
    return 2 if problems else 0


def _of_checkpoints(runs: Sequence[ListedRun], old: Sequence[Removal]) -> Iterator[Item]:
    going = {removal.run.path: removal for removal in old}
    for run in runs:
        removal = going.get(run.path)
        for checkpoint in removal.checkpoints if removal else ():
            size = sum(file.lstat().st_size for file in checkpoint.rglob("*") if file.is_file())
            yield Item(kind="checkpoints", path=checkpoint, bytes=size, kept=None)
        rest = run.checkpoint_bytes - (removal.bytes if removal else 0)
        if rest > 0:
            yield Item(kind="checkpoints", path=run.path, bytes=rest, kept="best, last, or kept by their run")


def _lines(root: Path, items: Sequence[Item], old: Sequence[Removal]) -> Iterator[str]:
    """A row for each kind, and one for each run that loses checkpoints."""
    rows = [("", "disk", "goes", "why the rest stays")]
    for kind in dict.fromkeys(item.kind for item in items):
        of_kind = [item for item in items if item.kind == kind]
        goes = [item.bytes for item in of_kind if item.kept is None]
        why = ", ".join(dict.fromkeys(item.kept for item in of_kind if item.kept is not None))
        rows.append((kind, disk_text(sum(item.bytes for item in of_kind)), disk_text(sum(goes)) if goes else "-", why))
    yield f"cache: {root}"
    if items:
        yield table(rows, "<>><")
    for removal in old[:_MAX_RUNS]:
        steps = ", ".join(str(step_of(path)) for path in removal.checkpoints[:5])
        more = f" and {len(removal.checkpoints) - 5} more" if len(removal.checkpoints) > 5 else ""
        yield f"{removal.run.path}: checkpoints of steps {steps}{more} ({disk_text(removal.bytes)})"
    if len(old) > _MAX_RUNS:
        yield f"and {len(old) - _MAX_RUNS} more runs"


def _figures(item: Item) -> dict[str, object]:
    return {"kind": item.kind, "path": str(item.path), "disk_bytes": item.bytes, "goes": item.kept is None,
            "why_kept": item.kept}  # fmt: skip
