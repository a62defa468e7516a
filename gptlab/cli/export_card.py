"""The model card of an exported model: what it is, how good it is, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gptlab.app.loaded_run import LoadedRun
from gptlab.model.interop.hf_config import ARCHITECTURES, MODELLING_MODULE, Form
from gptlab.runtime.records.metrics import read_metrics

_TRUST = {True: ", trust_remote_code=True", False: ""}


def model_card(run: LoadedRun, form: Form, *, n_params: int) -> str:
    """README.md in the form that the Hugging Face hub reads. It shows only the last part of a path: others read it."""
    model, bos = run.config.model, run.tokenizer.bos_id
    own = form == "gptlab"
    classes = f"`{ARCHITECTURES[form]}`" + (f", which is in `{MODELLING_MODULE}.py`" if own else " of transformers")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [gptlab]",
        "---",
        "",
        f"# {run.directory.path.resolve().name}",
        "",
        f"A GPT of {n_params:,} parameters: {model.n_layer} layers, width {model.n_embd}, {model.n_head} heads, "
        f"a vocabulary of {model.vocab_size:,} ({run.tokenizer.kind}), a context of {model.seq_len:,} tokens.",
        "",
        *_training(run),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "."  # this one',
        f"model = AutoModelForCausalLM.from_pretrained(folder{_TRUST[own]})",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{_TRUST[own]})",
        'inputs = tokenizer("The ", return_tensors="pt")',
        "outputs = model.generate(**inputs, max_new_tokens=40)",
        "print(tokenizer.decode(outputs[0], skip_special_tokens=True))",
        "```",
        "",
        f"- The class is {classes}." + (" `trust_remote_code=True` runs that file: read it first." if own else ""),
    ]
    if bos is None:
        lines.append("- The tokenizer has no special token. Text must not be empty.")
    else:
        lines.append(
            f"- The tokenizer puts BOS (token {bos}) before a text, since a document begins there; with "
            "`add_special_tokens=False` it does not. Generation ends where the model begins another document."
        )
    if run.tokenizer.kind == "char":
        lines.append("- transformers drops characters that the vocabulary does not have, without a word.")
    lines.append("- `gptlab import hf` makes a gptlab run of this folder again, with the same weights.")
    return "\n".join(lines) + "\n"


def _training(run: LoadedRun) -> list[str]:
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
    imported = run.directory.read_provenance().get("imported")
    if isinstance(imported, Mapping):  # gptlab did not train it, and does not know on what it was
        lines = [f"Imported from {_name(str(imported.get('source')))} ({imported.get('format')})."]
    else:
        lines = [
            f"Weights of step {run.step:,}{tokens} of a run of gptlab: recipe `{run.config.recipe}`, "
            f"text {sources}{begun}."
        ]
    if measured:
        bpb, loss = (float(str(measured[-1][name])) for name in ("val_bpb", "val_loss"))
        lines += ["", f"Validation: {bpb:.4f} bits per byte (`val_bpb`), {loss:.4f} nats a token."]
    return lines


def _name(path: str) -> str:
    return Path(path).name or path
