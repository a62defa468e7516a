"""`gptlab sample RUN --interactive`: prompts from a terminal, each continued as soon as it is entered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlab.config.errors import UserError, nearest_name, one_line
from gptlab.config.load import value_from_text
from gptlab.runtime.files.cache import cache_root

if TYPE_CHECKING:
    from gptlab.app.run.loaded_run import LoadedRun
    from gptlab.eval.continuation import Drawing

Show = Callable[[Sequence[str], Sequence[Iterable[str]]], None]
"""Prints each prompt with its continuation."""

FENCE = '"""'
HISTORY_LINES = 1000

SETTINGS: Mapping[str, tuple[Any, str]] = {
    "temperature": (float, "0: always the likeliest token"),
    "top_k": (int | None, "draw from the N likeliest tokens; 0: all"),
    "top_p": (float, "of these, from the fewest that sum to P; 1: all"),
    "min_p": (float, "of these, from P times the likeliest one's on; 0: all"),
    "max_tokens": (int, "of a text, at most"),
    "stop_at_bos": (bool, "stop where the model starts a new document"),
    "heal": (bool, "continue bytes, whatever tokens they end in"),
    "samples": (int, "texts for each prompt"),
    "seed": (int, "of the next text; counts up with each"),
}

HELP = f"""\
Enter a text, and the model continues it.
{FENCE} begins and ends a text of several lines, or one that begins with /.
{{settings}}
  /help                 this text
  /quit, Ctrl-D         the end; Ctrl-C stops a text
"""


def converse(run: LoadedRun, drawing: Drawing, show: Show, *, samples: int, seed: int) -> int:
    """Read prompts until the end of input; return the exit code. On a terminal, lines can be edited and are kept."""
    from gptlab.eval.continuation import continue_text, text_of

    asks = sys.stdin.isatty()
    values = {"samples": samples, "seed": seed}
    with _history(asks, cache_root(run.config.data.cache_dir) / "sample-history"):
        if asks:
            print(f"{run.directory.path.name}, step {run.step}. /help lists the settings.")
        while (entered := _read_prompt(asks)) is not None:
            prompt, is_fenced = entered
            try:
                if prompt.startswith("/") and not is_fenced:
                    if prompt.split() in (["/quit"], ["/exit"]):
                        break
                    drawing, values = _changed(prompt, drawing, values)
                elif prompt:
                    streams = continue_text(run.model, run.tokenizer, prompt, drawing, **values)
                    show([prompt] * len(streams), [text_of(tokens) for tokens in streams])
                    values = values | {"seed": values["seed"] + 1}
            except UserError as error:
                print(f"gptlab: {one_line(error)}", file=sys.stderr)
            except KeyboardInterrupt:
                print()
    return 0


def _read_prompt(asks: bool) -> tuple[str, bool] | None:
    """A line, or the lines between two fences, and whether it was fenced. The end of input ends a fenced text too; None
    if there was nothing before it."""
    try:
        line = input("> " if asks else "")
        if not line.startswith(FENCE):
            return line, False
        lines = [line.removeprefix(FENCE)]
        with suppress(EOFError):
            while not lines[-1].endswith(FENCE):
                lines.append(input(". " if asks else ""))
        return "\n".join(lines).removesuffix(FENCE).removeprefix("\n"), True
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return "", False


def _changed(command: str, drawing: Drawing, values: dict[str, int]) -> tuple[Drawing, dict[str, int]]:
    """What "/name value" makes of the settings. UserError for a value or name that cannot be."""
    name, _, text = command[1:].partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    current = {setting: getattr(drawing, setting, values.get(setting)) for setting in SETTINGS}
    if name == "help":
        rows = [f"  /{f'{key} {_shown(current[key])}':<20} {text}" for key, (_, text) in SETTINGS.items()]
        print(HELP.format(settings="\n".join(rows)), end="")
        return drawing, values
    if name not in SETTINGS:
        nearest = nearest_name(name, SETTINGS)
        raise UserError(f"/{name}: there is no such setting ({f'nearest: /{nearest}' if nearest else 'see /help'})")
    if text:
        value: Any = value_from_text(SETTINGS[name][0], text, f"/{name}")
        if name == "top_k":
            value = value or None  # as --top-k 0
        least = {"samples": 1, "max_tokens": 1, "seed": 0}.get(name)
        if least is not None and value < least:
            raise UserError(f"/{name} {value}: must not be below {least}")
        if name not in values:
            drawing = replace(drawing, **{name: value})
        else:
            values = values | {name: value}
    print(f"{name} {_shown(getattr(drawing, name, values.get(name)))}")
    return drawing, values


def _shown(value: object) -> str:
    return str(value).lower()


@contextmanager
def _history(asks: bool, path: Path) -> Iterator[None]:
    """On a terminal with readline (not on Windows): lines can be edited, recalled, and are kept for the next time."""
    try:
        import readline
    except ImportError:
        asks = False
    if not asks:
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
