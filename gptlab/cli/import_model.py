"""`gptlab import hf | nanogpt PATH DIR`: turn a model trained elsewhere into a run folder for all other commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.config.data import DataConfig
from gptlab.config.errors import UserError, nearest_name

if TYPE_CHECKING:
    from torch import Tensor

    from gptlab.config.model import ModelConfig
    from gptlab.data.tokenizer.tokenizer import Tokenizer
    from gptlab.runtime.records.console import Console

PROG = "gptlab import"
HELP = """\
usage: gptlab import {hf,nanogpt} PATH DIR [ARGUMENTS]

  hf       a GPT-2 or NanoChat as transformers keeps it, or what `gptlab export` wrote: a folder, or a name on the
           Hugging Face hub (gpt2, gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME), which is downloaded
  nanogpt  nanoGPT's ckpt.pt, read so that nothing in it can run

DIR becomes a run folder for `gptlab sample`, `eval` and `export`, and for `gptlab train --init-from DIR`."""

EVAL_TOKENS = 131_072
"""Tokens that `gptlab eval` measures an imported model on by default (quickstart's number); 33 TFLOP for GPT-2."""
_PLAIN_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
_SAFE_FILES = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLED_FILES = ["pytorch_model.bin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HfArguments:
    path: Positional[str]
    """Folder with config.json and weights, or a name on the hub."""
    dir: Positional[str]
    """Folder of the new run."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer. None: the one beside the weights, or GPT-2's."""
    data: tuple[str, ...] = DataConfig().source
    """Text whose last tenth, or 131,072 tokens of it, `gptlab eval DIR` measures on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGptArguments:
    path: Positional[str]
    """nanoGPT's ckpt.pt."""
    dir: Positional[str]
    """Folder of the new run."""
    meta: str | None = None
    """meta.pkl of the data that it was trained on, which maps tokens to characters. None: GPT-2's tokens."""
    tokenizer: str | None = None
    """Folder with the model's tokenizer, instead of --meta."""
    data: tuple[str, ...] = DataConfig().source
    """Text whose last tenth, or 131,072 tokens of it, `gptlab eval DIR` measures on."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    """An imported model."""

    model: ModelConfig
    tokenizer: Tokenizer
    weights: Mapping[str, Tensor]
    notes: Mapping[str, object]
    """The origin, for run.json."""


def main(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], None]] = {"hf": _hf, "nanogpt": _nanogpt}
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in commands:
        nearest = nearest_name(name, commands) or "hf"
        raise UserError(f"{PROG} {name}: unknown format, there are hf and nanogpt (nearest: {nearest})")
    commands[name](argv[1:])
    return 0


def _hf(argv: list[str]) -> None:
    description = "Make a run folder of a model that transformers reads."
    arguments = parse(HfArguments, argv, prog=f"{PROG} hf", description=description)
    from gptlab.model.interop.hf_weights import read_hf_weights
    from gptlab.model.interop.pretrained import hf_pretrained, hub_repository
    from gptlab.runtime.records.console import Console

    _require_free(Path(arguments.dir))  # fails now, not after a download
    with Console() as console:
        folder, commit = Path(arguments.path), None
        if not folder.is_dir():
            folder = _download(hub_repository(arguments.path), console)
            commit = folder.name  # the cache keeps a snapshot under its commit
        found = hf_pretrained(folder, name=arguments.path, tokenizer=arguments.tokenizer)
        weights = read_hf_weights(folder, found.model)
        notes = {"format": "hf", "source": arguments.path, "commit": commit}
        foreign = _Foreign(found.model, found.load_tokenizer(), weights, notes)
        _write(foreign, arguments.dir, arguments.data, ["import", "hf", *argv], console)


def _nanogpt(argv: list[str]) -> None:
    description = "Make a run folder of a checkpoint of nanoGPT. Only tensors and plain values are read; nothing runs."
    arguments = parse(NanoGptArguments, argv, prog=f"{PROG} nanogpt", description=description)
    if arguments.meta is not None and arguments.tokenizer is not None:
        raise UserError("--meta and --tokenizer both define the tokens: give only one of them")
    from gptlab.data.tokenizer.tokenizer import CharTokenizer, gpt2_tokenizer, load_tokenizer, read_character_table
    from gptlab.model.interop.hf_weights import read_nanogpt
    from gptlab.model.interop.pretrained import with_vocabulary
    from gptlab.runtime.records.console import Console

    _require_free(Path(arguments.dir))
    with Console() as console:
        checkpoint = read_nanogpt(Path(arguments.path))
        tokenizer: Tokenizer
        if arguments.meta is not None:
            tokenizer = CharTokenizer(read_character_table(Path(arguments.meta)), bos=False, in_order=True)
        else:
            tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else gpt2_tokenizer()
        remedy = f"name the table of its characters by --meta data/{checkpoint.notes['dataset'] or 'NAME'}/meta.pkl"
        model = with_vocabulary(checkpoint.model, tokenizer, of=arguments.path, remedy=remedy)
        notes = {"format": "nanogpt", "source": arguments.path, **checkpoint.notes}
        foreign = _Foreign(model, tokenizer, checkpoint.weights(model), notes)
        _write(foreign, arguments.dir, arguments.data, ["import", "nanogpt", *argv], console)


def _require_free(folder: Path) -> None:
    """UserError unless the run folder does not exist or is empty."""
    from gptlab.runtime.files.staged_folder import require_free
    from gptlab.runtime.records.run_directory import RunDirectory

    RunDirectory(folder).require_free()  # names the run that is already there
    require_free(folder)


def _write(foreign: _Foreign, folder: str, data: Sequence[str], argv: Sequence[str], console: Console) -> None:
    """Write the run folder, completely or not at all: status finished, with one checkpoint, of step 0."""
    import torch

    from gptlab.app.loaded_run import weights_fingerprint
    from gptlab.config.load import config_to_json
    from gptlab.config.run import BatchConfig, EvalConfig, RunConfig
    from gptlab.model.interop.pretrained import tokenizer_settings
    from gptlab.runtime.files.staged_folder import staged_folder
    from gptlab.runtime.hardware.place import Peak, Place
    from gptlab.runtime.records.provenance import provenance, take_evidence
    from gptlab.runtime.records.run_directory import RunDirectory, RunIdentity, config_sha256, new_run_id
    from gptlab.training.checkpoint.write import save_checkpoint

    model, tokenizer = foreign.model, foreign.tokenizer
    # Master weights are float32 or wider; float16 and bfloat16 convert without loss.
    weights = {
        name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in foreign.weights.items()
    }
    config = RunConfig(
        recipe="imported",
        model=model,
        tokenizer=tokenizer_settings(tokenizer, None),
        # nanoGPT's split, and rows without BOS, which a table of characters does not have.
        data=DataConfig(
            source=tuple(part for word in data for part in word.split(",") if part),
            rows="random",
            split="tail",
            val_fraction=0.1,
        ),
        batch=BatchConfig(total_tokens=model.seq_len, micro_sequences=1),
        eval=EvalConfig(tokens=EVAL_TOKENS, micro_sequences=max(1, 8192 // model.seq_len)),
    )
    place = Place(torch.device("cpu"), torch.float32, torch.get_num_threads(), Peak(None, "unknown"))
    evidence = take_evidence(dict(os.environ))
    # The training data is unknown.
    record = provenance(argv, evidence.code, place, data_fingerprint="", tokenizer_fingerprint=tokenizer.fingerprint)
    del record["data_fingerprint"]
    imported = {**foreign.notes, "fingerprint": weights_fingerprint(weights)}

    identity = RunIdentity(new_run_id(), config_to_json(config))
    record |= {"imported": imported, "run_id": identity.id, "config_sha256": config_sha256(identity.config)}
    state = {"step": 0, "train_seconds": 0.0, "imported": imported, "run": identity.to_json()}

    def contents(run: RunDirectory) -> None:
        tokenizer.save(run.tokenizer_path)
        run.write_files(evidence.files())
        save_checkpoint(run.checkpoints_path, 0, model=weights, optimizer={}, state=state)

    with staged_folder(Path(folder)) as staged:
        RunDirectory.create(staged, identity.config, record, contents=contents).set_status("finished")
    n_parameters = sum(value.numel() for value in weights.values())
    console.line(
        f"{folder}: {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, context {model.seq_len}, "
        f"vocabulary {model.vocab_size:,} ({tokenizer.kind}), {n_parameters / 1e6:.2f}M parameters"
    )
    console.line(f'try      gptlab sample {folder} --prompt "..."')
    console.line(f"train on gptlab train nanogpt/finetune --init-from {folder}")


def _download(repository: str, console: Console) -> Path:
    """The folder of a model of the hub, downloaded unless the local cache has it; pickled weights only if there are no
    safetensors. UserError, one line, if that fails."""
    from huggingface_hub import constants, snapshot_download

    from gptlab.model.interop.hf_config import WEIGHT_FILES

    console.line(f"fetching {repository} from {constants.ENDPOINT}, or from the local cache")
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*_PLAIN_FILES, *_SAFE_FILES]))
        if not any((folder / name).is_file() for name in WEIGHT_FILES):
            folder = Path(snapshot_download(repository, allow_patterns=[*_PLAIN_FILES, *_PICKLED_FILES]))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot fetch {repository}: {_why_not(error, constants.ENDPOINT)}") from error
    return folder


def _why_not(error: Exception, address: str) -> str:
    from huggingface_hub import errors

    # huggingface_hub wraps network errors in "not found locally".
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, errors.GatedRepoError):
        return f"{address} asks for its terms to be accepted on its page, and for `hf auth login`"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{address} has no such model, and there is no such folder here"
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it is not in the local cache; unset it, or name a folder that holds the model"
    first = next(iter(str(cause).splitlines()), "") or type(cause).__name__
    return f"{first} ({address}); with no network, name a folder that holds the model"
