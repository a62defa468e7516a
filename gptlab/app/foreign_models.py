"""Models from other programs, turned into run folders, and a run's model as a folder that transformers loads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gptlab.app.run.loaded_run import LoadedRun
from gptlab.app.run.saved_weights import weights_fingerprint
from gptlab.config.errors import UserError
from gptlab.config.load import config_to_json
from gptlab.config.model import ModelConfig
from gptlab.config.run import BatchConfig, DataConfig, EvalConfig, RunConfig
from gptlab.data.corpus.documents import require_known
from gptlab.data.tokenizer.tokenizer import (
    CharTokenizer,
    Tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    read_character_table,
    save_for_transformers,
)
from gptlab.model.interop.hf_config import (
    ARCHITECTURES,
    MASKED_DOCUMENTS,
    MODELLING_MODULE,
    WEIGHT_FILES,
    Form,
    export_config,
    read_hf_config,
)
from gptlab.model.interop.hf_weights import read_hf_weights, read_nanogpt, to_transformers
from gptlab.model.interop.pretrained import hf_pretrained, hub_repository, tokenizer_settings, with_vocabulary
from gptlab.runtime.files.plain_file import listed_sources, to_json
from gptlab.runtime.files.staged_folder import require_free, staged_folder
from gptlab.runtime.files.tensor_file import write_bytes, write_tensors
from gptlab.runtime.hardware.peak import Peak
from gptlab.runtime.hardware.place import Place
from gptlab.runtime.records.console import Console
from gptlab.runtime.records.metrics import read_metrics
from gptlab.runtime.records.provenance import provenance, take_evidence
from gptlab.runtime.records.run_directory import RunDirectory, identity
from gptlab.training.checkpoint.write import save_checkpoint

EVAL_TOKENS = 131_072
"""Tokens that `gptlab eval` measures an imported model on by default (quickstart's number); 33 TFLOP for GPT-2."""
WITHOUT_MASK = "data.mask_documents hid earlier documents from a token in training, not here: give each document alone"
_PLAIN_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
_SAFE_FILES = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLED_FILES = ["pytorch_model.bin"]


@dataclass(frozen=True, slots=True)
class ForeignModel:
    model: ModelConfig
    tokenizer: Tokenizer
    weights: Mapping[str, Tensor]
    notes: Mapping[str, object]
    """The origin, for run.json."""


def hf_model(path: str, tokenizer: str | None, console: Console) -> ForeignModel:
    """What transformers reads from a folder, or from a name on the hub, which is downloaded. `tokenizer`: a folder with
    it; None: the one beside the weights, or GPT-2's."""
    folder, commit = Path(path), None
    if not folder.is_dir():
        folder = _download(hub_repository(path), console)
        commit = folder.name  # the cache keeps a snapshot under its commit
    found = hf_pretrained(folder, name=path, tokenizer=tokenizer)
    if read_hf_config(folder).get(MASKED_DOCUMENTS):
        console.warn(WITHOUT_MASK)
    weights = read_hf_weights(folder, found.model)
    notes = {"format": "hf", "source": path, "commit": commit}
    return ForeignModel(found.model, found.load_tokenizer(), weights, notes)


def nanogpt_model(path: str, meta: str | None, tokenizer_folder: str | None) -> ForeignModel:
    """nanoGPT's ckpt.pt. `meta`: its meta.pkl, which maps tokens to characters; None: GPT-2's tokens."""
    checkpoint = read_nanogpt(Path(path))
    tokenizer: Tokenizer
    if meta is not None:
        tokenizer = CharTokenizer(read_character_table(Path(meta)), bos=False, in_order=True)
    else:
        tokenizer = load_tokenizer(tokenizer_folder) if tokenizer_folder else gpt2_tokenizer()
    remedy = f"name the table of its characters by --meta data/{checkpoint.notes['dataset'] or 'NAME'}/meta.pkl"
    model = with_vocabulary(checkpoint.model, tokenizer, of=path, remedy=remedy)
    notes = {"format": "nanogpt", "source": path, **checkpoint.notes}
    return ForeignModel(model, tokenizer, checkpoint.weights(model), notes)


def require_free_run(folder: str) -> None:
    """UserError unless the run folder does not exist or is empty: now, not after a download."""
    RunDirectory(Path(folder)).require_free()  # names the run that is already there
    require_free(Path(folder))


def write_run(foreign: ForeignModel, folder: str, data: Sequence[str], argv: Sequence[str], console: Console) -> None:
    """Write the run folder, completely or not at all: status finished, with one checkpoint, of step 0. UserError where
    `data` names text that cannot be."""
    model, tokenizer = foreign.model, foreign.tokenizer
    # Master weights are float32 or wider; float16 and bfloat16 convert without loss.
    weights = {
        name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in foreign.weights.items()
    }
    sources = listed_sources(data)
    for source in sources:
        if not os.path.exists(os.path.expanduser(source)):
            require_known(source)
    config = RunConfig(
        recipe="imported",
        model=model,
        tokenizer=tokenizer_settings(tokenizer, None),
        # nanoGPT's split, and rows without BOS, which a table of characters does not have.
        data=DataConfig(source=sources, rows="random", split="tail", val_fraction=0.1),
        batch=BatchConfig(total_tokens=model.seq_len, micro_sequences=1),
        eval=EvalConfig(tokens=EVAL_TOKENS, micro_sequences=max(1, 8192 // model.seq_len)),
    )
    evidence = take_evidence(dict(os.environ))
    place = Place(torch.device("cpu"), torch.float32, torch.get_num_threads(), Peak(None, "unknown"))
    imported = {**foreign.notes, "fingerprint": weights_fingerprint(weights)}

    of_run = identity(config_to_json(config))
    others = {
        "from": None, "world_size": 1, "tokenizer_fingerprint": tokenizer.fingerprint, "imported": imported,
        "run_id": of_run["id"],
    }  # fmt: skip
    record = provenance(argv, evidence.code, place, others)
    state = {"step": 0, "train_seconds": 0.0, "imported": imported, "run": of_run}

    def contents(run: RunDirectory) -> None:
        tokenizer.save(run.tokenizer_path)
        run.write_files(evidence.files)
        save_checkpoint(run.checkpoints_path, 0, model=weights, optimizer={}, state=state)

    with staged_folder(Path(folder)) as staged:
        RunDirectory.create(staged, of_run["config"], record, contents=contents).set_status("finished")
    n_parameters = sum(value.numel() for value in weights.values())
    console.line(
        f"{folder}: {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, context {model.seq_len}, "
        f"vocabulary {model.vocab_size:,} ({tokenizer.kind}), {n_parameters / 1e6:.2f}M parameters"
    )
    console.line(f'try      gptlab sample {folder} --prompt "..."')
    console.line(f"train on gptlab train nanogpt/finetune --init-from {folder}")
    console.line(f"measure  gptlab eval {folder}, on {', '.join(sources)}: --data FILE for your own text")


def _download(repository: str, console: Console) -> Path:
    """The folder of a model of the hub, downloaded unless the local cache has it; pickled weights only if there are no
    safetensors. UserError, one line, if that fails."""
    from huggingface_hub import constants, snapshot_download

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


def export(run: LoadedRun, target: Path, *, form: Form, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write the model's folder, completely or not at all. UserError if it cannot be written."""
    model, bos_id = run.config.model, run.tokenizer.bos_id
    masters = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in to_transformers(masters, model, form).items()}
    texts = {"README.md": model_card(run, form, n_params=sum(tensor.numel() for tensor in tensors.values()))}
    if form == "gptlab":
        texts[f"{MODELLING_MODULE}.py"] = modelling_source()
    masked = {MASKED_DOCUMENTS: run.config.data.mask_documents}
    objects = {
        "config.json": export_config(model, form, bos_id=bos_id, dtype=dtype) | masked,
        # A model that has nothing more to say begins a new document.
        "generation_config.json": {"bos_token_id": bos_id, "eos_token_id": bos_id, "pad_token_id": bos_id},
    }
    with staged_folder(target) as staged:
        save_for_transformers(run.tokenizer, staged, max_tokens=model.seq_len)
        # transformers asks the file which framework wrote it.
        write_tensors(staged / "model.safetensors", tensors, metadata={"format": "pt"})
        for name, value in objects.items():
            write_bytes(staged / name, (to_json(value, indent=2) + "\n").encode())
        for name, text in texts.items():
            write_bytes(staged / name, text.encode())


def modelling_source() -> str:
    """The text of the modelling file. gptlab never imports it, which would need transformers."""
    return (resources.files("gptlab.model.interop") / f"{MODELLING_MODULE}.py").read_text(encoding="utf-8")


_PROMPT = "The "
"""Of the example in a model's card."""


def model_card(run: LoadedRun, form: Form, *, n_params: int) -> str:
    """README.md in the form that the Hugging Face hub reads. It shows only the last part of a path: others read it."""
    model, bos = run.config.model, run.tokenizer.bos_id
    own = form == "gptlab"
    trust = ", trust_remote_code=True" if own else ""
    where = f", which is in `{MODELLING_MODULE}.py`. `trust_remote_code=True` runs that file: read it first."
    notes = [f"The class is `{ARCHITECTURES[form]}`{where if own else ' of transformers.'}"]
    if bos is None:
        notes.append("The tokenizer has no special token. Text must not be empty.")
    else:
        notes.append(
            f"The tokenizer puts BOS (token {bos}) before a text, since a document begins there; with "
            "`add_special_tokens=False` it does not. Generation ends where the model begins another document."
        )
    if run.config.data.mask_documents:
        notes.append("In training no token saw past the BOS of its document. Here it does: give each document alone.")
    if run.tokenizer.kind == "char":
        notes.append("transformers drops characters that the vocabulary does not have, without a word.")
    notes.append("`gptlab import hf` makes a gptlab run of this folder again, with the same weights.")
    listed = "\n".join(f"- {note}" for note in notes)
    room = model.seq_len - len(run.tokenizer.encode(_PROMPT)) - (bos is not None)
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags: [gptlab]
---

# {run.directory.path.resolve().name}

A GPT of {n_params:,} parameters: {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, \
a vocabulary of {model.vocab_size:,} ({run.tokenizer.kind}), a context of {model.seq_len:,} tokens.

{_training(run)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
model = AutoModelForCausalLM.from_pretrained(folder{trust})
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
inputs = tokenizer("{_PROMPT}", return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens={max(1, min(40, room))})
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
```

{listed}
"""


def _training(run: LoadedRun) -> str:
    """The origin of the weights, and the validation loss measured at the exported step."""
    path = run.directory.metrics_path
    measured = [
        line
        for line in (read_metrics(path) if path.exists() else [])
        if line.get("kind") == "eval" and line.get("step") == run.step
    ]
    tokens = f", after {measured[-1]['tokens']:,} training tokens" if measured and "tokens" in measured[-1] else ""
    begun = f", begun with the weights of {_name(run.config.init_from)}" if run.config.init_from else ""
    sources = ", ".join(_name(source) for source in run.config.data.source)
    imported = run.directory.recorded().get("imported")
    if isinstance(imported, Mapping):  # gptlab did not train it, and does not know on what it was
        text = f"Imported from {_name(str(imported.get('source')))} ({imported.get('format')})."
    else:
        text = (
            f"Weights of step {run.step:,}{tokens} of a run of gptlab: recipe `{run.config.recipe}`, "
            f"text {sources}{begun}."
        )
    if measured:
        bpb, loss = (float(str(measured[-1][name])) for name in ("val_bpb", "val_loss"))
        text += f"\n\nValidation: {bpb:.4f} bits per byte (`val_bpb`), {loss:.4f} nats a token."
    return text


def _name(path: str) -> str:
    return Path(path).name or path
