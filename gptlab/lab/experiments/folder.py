"""A lab's folder.

lab.json          what is compared and how: `Settings`
program.md        instructions for whoever proposes, a person or a program
ledger.jsonl      everything that was done (`ledger.py`)
results.tsv       the same in autoresearch's columns
baseline/         the configuration that every run repeats (`gptlab train --from`), and the machine it was sized to
code/gptlab/      the package that experiment 0 ran
data/             what candidates may read: training tokens and the tokenizer
private/          what only the judge reads: two slices of the validation text
experiments/0007/ the proposal, its runs, and what the judge said
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import gptlab
from gptlab.config.errors import UserError, cannot
from gptlab.config.load import apply_overrides, config_from_json, config_to_json, flatten
from gptlab.config.run import CheckpointConfig, DataConfig, EvalConfig, RunConfig, SampleConfig
from gptlab.config.scaling import Machine
from gptlab.data.corpus.corpus_files import folder_files
from gptlab.data.corpus.documents import STDLIB, from_anywhere
from gptlab.data.prepare import PreparedData
from gptlab.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gptlab.data.tokens.shards import SplitWriter, TokenSplit
from gptlab.lab.experiments.ledger import Experiment, Ledger, Slice
from gptlab.lab.experiments.program import PROGRAM
from gptlab.runtime.files.plain_file import read_json_object, write_json_atomic
from gptlab.runtime.files.staged_folder import staged_folder
from gptlab.runtime.records.provenance import code_fingerprint
from gptlab.runtime.records.run_directory import RunDirectory

At = Literal["time", "steps", "tokens", "flops"]

BLOCK_TOKENS = 1 << 22
MOST_FILES = 1_000
"""Files of a corpus that are hidden one by one: each is a mount and a watch, of which a user has 8,192 or more."""
STAND_IN_TOKENS = 65_536
"""Of the training text, in the place of validation text that candidates may not see. Nothing is measured on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """lab.json."""

    name: str
    recipe: str
    seconds: float | None
    """Training time of the baseline. None: `steps` are given."""
    steps: int | None
    """Optimizer steps of the baseline. None: as many as it makes in `seconds`."""
    at: At = "time"
    """What baseline and candidate have in common."""
    seeds: int = 3
    """Seeds with which the noise is measured before the first experiment."""
    first_seed: int = 1
    code_fingerprint: str = ""
    """Of code/gptlab, which also judges."""
    data_fingerprint: str = ""
    tokenizer_fingerprint: str = ""
    validation_bytes: Mapping[str, int]
    """UTF-8 bytes of each slice of the validation text."""
    corpus: Mapping[str, Any] = field(default_factory=dict)
    """{dotted name: value} of the fields of the corpus, and of the tokenizer's path, that baseline/config.json has not
    (`_only_training`): with them, its configuration is that of `gptlab lab new`, in any folder."""
    asked: Sequence[str] = ()
    """The words of `gptlab lab new` after the name."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """{name: value} of what these words said, with what a TOML file among them did."""
    version: int = 1

    @property
    def length(self) -> str:
        """How long the baseline trains, in words."""
        return f"{self.steps:,} steps" if self.seconds is None else f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Lab:
    path: Path
    settings: Settings

    @classmethod
    def open(cls, path: str | Path) -> Lab:
        """UserError where there is no lab, or lab.json is damaged."""
        path = Path(path)
        if not (path / "lab.json").is_file():
            raise UserError(f"there is no lab in {path}; `gptlab lab new NAME RECIPE` makes one")
        values = read_json_object(path / "lab.json")
        try:
            return cls(path.resolve(), Settings(**values))  # type: ignore[arg-type]
        except TypeError as error:
            raise UserError(f"{path / 'lab.json'} cannot be used: {error}") from None

    @classmethod
    def open_to_judge(cls, path: str | Path) -> Lab:
        """The same, for what trains and judges. UserError where this process runs another gptlab than the lab's own:
        a changed one would judge itself, and experiments that two have judged cannot be compared."""
        lab, running = cls.open(path), Path(gptlab.__file__).parent
        if code_fingerprint(running) != lab.settings.code_fingerprint:
            command = f"PYTHONPATH={shlex.quote(str(lab.path / 'code'))} {shlex.quote(sys.executable)} -P -m gptlab lab"
            raise UserError(
                f"{running} is not the code that {lab.path} began with, which judges: give the command as {command} ..."
            )
        return lab

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path / "ledger.jsonl")

    def has_baseline(self, experiments: Mapping[int, Experiment]) -> bool:
        """Whether `lab new` is through: every seed of the baseline and of the edit that measures its noise."""
        first = self.settings.first_seed
        wanted = {("validation", seed) for seed in range(first, first + self.settings.seeds)}
        return all(number in experiments and wanted <= experiments[number].bpb.keys() for number in (0, 1))

    def require_baseline(self) -> dict[int, Experiment]:
        """Every experiment so far. UserError unless `has_baseline`."""
        if not self.has_baseline(experiments := self.ledger.experiments()):
            raise UserError(f"{self.path} has no baseline yet: `gptlab lab new` with the same arguments finishes it")
        return experiments

    @property
    def private(self) -> Path:
        return self.path / "private"

    def experiment(self, number: int) -> Path:
        """The folder of an experiment."""
        return self.path / "experiments" / f"{number:04}"

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / "data" / "tokenizer")

    def slice(self, name: Slice) -> TokenSplit:
        """A part of the validation text, for the judge."""
        return TokenSplit.open(self.private / name, "val", n_shards=1, n_bytes=self.settings.validation_bytes[name])

    def baseline_config(self) -> dict[str, Any]:
        """{dotted name: value} of the configuration that every run repeats. UserError where it is damaged."""
        return flatten(read_json_object(self.path / "baseline" / "config.json"))

    def run_config(self, seed: int, vocab_size: int | None) -> RunConfig:
        """The configuration of the first baseline's runs, apart from their length and folder."""
        values = {"seed": seed, "model.vocab_size": vocab_size, **self.places()}
        return apply_overrides(config_from_json(read_json_object(self.path / "baseline" / "config.json")), values)

    def texts(self) -> tuple[list[Path], list[str]]:
        """(files and folders of the corpus that the lab was made of, where they still are; sources that cannot be
        hidden from a candidate, since Python itself is among them). The validation text is in them."""
        values = self.baseline_config() | dict(self.settings.corpus)
        sources = [*values["data.source"], *values["data.val_source"]]
        found = {source: _places_of(source) for source in sources if os.path.isabs(source)}
        library, python = Path(sysconfig.get_path("stdlib")).resolve(), _python()
        resolved = {source: [path.resolve() for path in paths] for source, paths in found.items()}
        shown = [
            source for source, paths in resolved.items()
            if any(path in python or path.is_relative_to(library) for path in paths)
        ]  # fmt: skip
        hidden = [path for source, paths in found.items() if source not in shown for path in paths]
        if (cache := values["data.cache_dir"]) is not None and os.path.isdir(cache):
            hidden.append(Path(cache))
        return hidden, [*(source for source in sources if source == STDLIB), *shown]

    def places(self) -> dict[str, Any]:
        """Fields of every run that say where things are, so that a lab may be moved."""
        return {
            "data.source": (str(self.path / "data" / "tokens"),),
            "tokenizer.path": str(self.path / "data" / "tokenizer"),
        }


def create(
    path: Path, config: RunConfig, data: PreparedData, settings: Settings, machine: Machine | None = None
) -> Lab:  # fmt: skip
    """A new lab in `path`, whole or not at all. `data`: the tokens of `config`; `settings`: what the caller chooses;
    `machine`: what the recipe sized `config` to, None where it does not ask.

    UserError where the folder is not free, or the validation text is too short to be divided.
    """
    with staged_folder(path) as folder, cannot(f"write {path}"):
        package = Path(gptlab.__file__).parent
        shutil.copytree(package, folder / "code" / "gptlab", ignore=shutil.ignore_patterns("__pycache__"))
        data.tokenizer.save(folder / "data" / "tokenizer")
        _write_training_tokens(data, folder / "data" / "tokens")
        validation_bytes = _write_slices(data, folder / "private")
        settings = replace(
            settings, code_fingerprint=code_fingerprint(folder / "code" / "gptlab"),
            data_fingerprint=data.fingerprint, tokenizer_fingerprint=data.tokenizer.fingerprint,
            validation_bytes=validation_bytes, corpus=_corpus(config),
        )  # fmt: skip
        baseline = RunDirectory(folder / "baseline")
        baseline.path.mkdir()
        write_json_atomic(baseline.config_path, config_to_json(_only_training(config)))
        if machine is not None:  # A proposed depth asks the recipe again.
            sized_for = {"device": machine.device, "training_flops_per_second": machine.flops_per_second}
            write_json_atomic(baseline.machine_path, sized_for)
        program = PROGRAM.format(name=settings.name, length=settings.length, recipe=settings.recipe)
        (folder / "program.md").write_text(program, encoding="utf-8")
        write_json_atomic(folder / "lab.json", asdict(settings))
    return Lab.open(path)


def _only_training(config: RunConfig) -> RunConfig:
    """`config` without what the judge does itself, without checkpoints before the last, and without what names other
    places than the lab's (`Lab.places`)."""
    return replace(
        config,
        run_dir=None,
        data=replace(config.data, val_source=(), hub_files=None, cache_dir=None),
        eval=EvalConfig(at_end=False, tokens=config.eval.tokens),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every_seconds=60.0, keep_last=1, keep_best=False),
    )


def _corpus(config: RunConfig) -> dict[str, Any]:
    data, path = config.data, config.tokenizer.path
    source, val_source = ([*map(from_anywhere, sources)] for sources in (data.source, data.val_source))
    values = {
        "data.source": source, "data.val_source": val_source, "data.hub_files": data.hub_files,
        "data.cache_dir": data.cache_dir and os.path.abspath(os.path.expanduser(data.cache_dir)),
        "tokenizer.path": path and os.path.abspath(path),
    }  # fmt: skip
    stored = flatten(config_to_json(_only_training(config)))
    return {name: value for name, value in values.items() if value != stored[name]}


def _places_of(source: str) -> list[Path]:
    """The files and folders of a path or a glob, and the files that are linked there: of very many, their folders.
    Places that this user cannot access are left out, since no candidate can access them."""
    places = [source]
    if not os.path.exists(source):
        places = [path for path in glob.glob(source, recursive=True) if os.path.isfile(path)]
    for place in filter(os.path.isdir, [*places]):
        with suppress(UserError):  # a folder in it cannot be listed
            places += [os.path.realpath(file.path) for file in folder_files(Path(place))[0] if file.path.is_symlink()]
    if len(places) > MOST_FILES:
        places = list({place if os.path.isdir(place) else os.path.dirname(place) for place in places})
    return [Path(place) for place in places if os.path.exists(place)]


def _python() -> set[Path]:
    """Where the running Python and its packages are, and all folders that hold them."""
    parts = {
        sys.executable,
        sys.prefix,
        sys.base_prefix,
        str(Path(np.__file__).parent),
        *sysconfig.get_paths().values(),
    }
    found = {Path(part).resolve() for part in parts}
    return {folder for part in found for folder in (part, *part.parents)}


def has_stand_in(data: DataConfig) -> bool:
    """Whether the corpus is a lab's (`Lab.places`), in which training text stands in for what validates."""
    return any(Path(source, "../../lab.json").is_file() for source in data.source)


def require_validation_text(data: DataConfig) -> None:
    """UserError for a corpus that `has_stand_in`, unless another text validates."""
    if has_stand_in(data) and not data.val_source:
        raise UserError(
            f"{', '.join(data.source)} is a lab's training text, and its judge keeps what validates (`gptlab lab show` "
            "has the bits per byte of its runs): name the corpus that the lab was made of with --data"
        )


def _write_training_tokens(data: PreparedData, folder: Path) -> None:
    """The training text as token shards, in its order, and a stand-in for the validation text."""
    folder.mkdir(parents=True)
    size = data.tokenizer.vocab_size
    writer = SplitWriter(folder, "train", size, None)
    for first in range(0, data.train.n_tokens, BLOCK_TOKENS):
        _add(writer, data.train.read(first, min(BLOCK_TOKENS, data.train.n_tokens - first)))
    writer.close()
    stand_in = SplitWriter(folder, "val", size, None)
    _add(stand_in, data.train.read(0, min(STAND_IN_TOKENS, data.train.n_tokens)))
    stand_in.close()
    for index in folder.glob("*.npy"):  # A candidate finds documents by BOS.
        index.unlink()


def _write_slices(data: PreparedData, folder: Path) -> dict[str, int]:
    """The validation text in two halves, by whole documents where there are several; {slice: UTF-8 bytes}."""
    text, starts = data.val, data.val.document_starts
    middle = int(starts[np.argmin(np.abs(starts - text.n_tokens // 2))])
    if not 0 < middle < text.n_tokens:
        middle = text.n_tokens // 2
    n_bytes = {}
    for name, first, end in (("validation", 0, middle), ("promotion", middle, text.n_tokens)):
        inner = starts[(starts > first) & (starts < end)]
        (folder / name).mkdir(parents=True)
        writer = SplitWriter(folder / name, "val", data.tokenizer.vocab_size, None)
        for start, stop in zip((first, *inner), (*inner, end), strict=True):
            document = int(np.searchsorted(starts, start, side="right")) - 1
            _add(writer, text.read(int(start), int(stop - start)), int(text.content_hashes[document]))
        writer.close()
        n_bytes[name] = int(data.tokenizer.token_bytes[text.read(first, end - first)].sum())
        if n_bytes[name] == 0:
            raise UserError("the validation text is too short to be divided into one part to judge, one to confirm")
    for private in (folder, *(folder / name for name in n_bytes)):
        os.chmod(private, 0o700)
    return n_bytes


def _add(writer: SplitWriter, tokens: np.ndarray, content_hash: int = 0) -> None:
    writer.add(tokens, n_bytes=0, content_hash=content_hash)
