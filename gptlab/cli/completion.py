"""`gptlab completion bash|zsh|fish`: completion of commands, arguments and their values, as a script for the shell."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from gptlab.cli.arguments.help import negated_flag
from gptlab.cli.arguments.parser import DESCRIBE, DescribedError, Positional, parse
from gptlab.config.errors import UserError
from gptlab.config.fields import bare, checked_dataclass, flag_of

Shell = Literal["bash", "zsh", "fish"]

DESCRIPTION = """\
Print a completion script: `source <(gptlab completion bash)`, in ~/.bashrc or ~/.zshrc; for fish `gptlab completion \
fish > ~/.config/fish/completions/gptlab.fish`. It holds all names, so that completing starts no Python."""

_FURTHER = {"runs": ("prune",)}
"""Words that a command takes before its arguments, beside those of `run_subcommand`."""

Words = Mapping[str, Sequence[str]]
"""What can follow, by where it follows: `data` a command of `data`, `train --dtype` a value of that flag."""


@checked_dataclass("--")
class CompletionArguments:
    shell: Positional[Shell]
    """bash | zsh | fish."""


def main(argv: Sequence[str]) -> int:
    arguments = parse(CompletionArguments, argv, prog="gptlab completion", description=DESCRIPTION)
    print(SCRIPTS[arguments.shell](all_words()), end="")
    return 0


def all_words() -> dict[str, list[str]]:
    """Every command line's words, from the dataclasses that its arguments are read into."""
    from gptlab.cli.main import COMMANDS

    words = {"": [*COMMANDS, "--help", "--version"]}
    for name, (module, _) in COMMANDS.items():
        words |= _words_of([name], importlib.import_module(module).main)
    return words


def _described(path: list[str], main: Any) -> DescribedError:
    for name in ([], ["NAME"]):  # some take a name first
        try:
            main([*path[1:], *name, DESCRIBE])
        except DescribedError as found:
            return found
        except UserError:
            continue
    return DescribedError({})


def _words_of(path: list[str], main: Any) -> dict[str, list[str]]:
    found, key = _described(path, main), " ".join(path)
    further = _FURTHER.get(key, ()) if found.commands is None else found.commands
    words = {key: [*further, *_choices_of_positionals(found), *_flags(found), "--help"]}
    for command in further:
        words |= _words_of([*path, command], main)
    values = {f"{key} {flag_of(name)}": _values(kind) for name, kind in found.fields.items()}
    return words | {place: choices for place, choices in values.items() if choices}


def _flags(found: DescribedError) -> list[str]:
    flags = []
    for name, kind in found.fields.items():
        if name not in found.positionals:
            flags += [flag_of(name), *([negated_flag(name)] if bare(kind)[0] is bool else [])]
    return flags


def _choices_of_positionals(found: DescribedError) -> list[str]:
    from gptlab.config.recipes import RECIPES

    choices = [value for name in found.positionals if name in found.fields for value in _values(found.fields[name])]
    return [*choices, *(RECIPES if "recipe" in found.positionals else ())]


def _values(kind: Any) -> list[str]:
    leaf = bare(kind)[0]
    leaf = get_args(leaf)[0] if get_origin(leaf) is tuple else leaf
    return list(get_args(leaf)) if get_origin(leaf) is Literal else []


# A path is the command with its further words: `data prepare`. A value comes right after its flag; names of files and
# folders complete everywhere, since runs are folders.
_WORDS = """\
_gptlab_words() {
  case "$1" in
@CASES@
  esac
}
"""

_BASH = """\
_gptlab() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" path="" word found
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word != -* ]] && _gptlab_words "${path:+$path }$word" >/dev/null || break
    path="${path:+$path }$word"
  done
  if [[ $prev == --* ]] && found=$(_gptlab_words "$path $prev"); then
    COMPREPLY=($(compgen -W "$found" -- "$cur"))
    return
  fi
  COMPREPLY=($(compgen -W "$(_gptlab_words "$path")" -- "$cur"))
  if [[ $cur != -* && -n $path ]]; then
    local IFS=$'\\n'
    COMPREPLY+=($(compgen -f -- "$cur"))
    compopt -o filenames 2>/dev/null
  fi
}
complete -F _gptlab gptlab
"""

_ZSH = """\
_gptlab() {
  local place= word
  local -a found
  for word in $words[2,CURRENT-1]; do
    [[ $word != -* ]] && _gptlab_words "${place:+$place }$word" >/dev/null || break
    place="${place:+$place }$word"
  done
  if [[ $words[CURRENT-1] == --* ]] && found=($(_gptlab_words "$place $words[CURRENT-1]")); then
    compadd -a found
    return
  fi
  found=($(_gptlab_words "$place"))
  compadd -a found
  [[ $PREFIX == -* || -z $place ]] || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _gptlab gptlab
"""

_FISH = """\
function __gptlab_words
  switch "$argv"
@CASES@
    case '*'
      return 1
  end
end
function __gptlab_complete
  set -l words (commandline -opc)[2..]
  set -l path
  for word in $words
    string match -q -- '-*' $word; and break
    __gptlab_words $path $word >/dev/null; or break
    set -a path $word
  end
  if test (count $words) -gt 0; and string match -q -- '--*' $words[-1]
    __gptlab_words $path $words[-1]; and return
  end
  __gptlab_words $path
  test (count $path) -gt 0; and __fish_complete_path (commandline -ct)
end
complete -c gptlab -f -a '(__gptlab_complete)'
"""


def bash_script(words: Words) -> str:
    return _words_function(words) + _BASH


def zsh_script(words: Words) -> str:
    return _words_function(words) + _ZSH


def _words_function(words: Words) -> str:
    cases = [f"    {shlex.quote(place)}) echo {shlex.quote(' '.join(found))};;" for place, found in words.items()]
    return _WORDS.replace("@CASES@", "\n".join([*cases, "    *) return 1;;"]))


def fish_script(words: Words) -> str:
    cases = [
        f"    case {shlex.quote(place)}\n      printf '%s\\n' {' '.join(map(shlex.quote, found))}"
        for place, found in words.items()
    ]
    return _FISH.replace("@CASES@", "\n".join(cases))


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
