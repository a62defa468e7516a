"""`gptlab export RUN FOLDER`: write a trained model in a form that transformers loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.model.interop.hf_config import ARCHITECTURES, MODELLING_MODULE, Form, choose_form, export_config
from gptlab.runtime.files.staged_folder import require_free, staged_folder

if TYPE_CHECKING:
    from gptlab.app.loaded_run import LoadedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportArguments:
    run: Positional[str]
    """Folder of the run, such as runs/NAME."""
    folder: Positional[str]
    """Folder to write; it must not exist or be empty."""
    format: Literal["hf"] = "hf"
    """hf: for transformers.AutoModelForCausalLM and AutoTokenizer. As GPT-2 or NanoChat if the model's parts allow,
    otherwise with a modelling file beside the weights, which needs trust_remote_code=True."""
    checkpoint: str = "latest"
    """latest | best (lowest recorded validation loss) | the number of a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights. float32: the master weights, bit for bit; bfloat16: rounded, half the size."""


def main(argv: Sequence[str]) -> int:
    """Prints to stdout what was written, in which form and why; everything else goes to stderr."""
    description = "Write a trained model as a folder that transformers loads."
    arguments = parse(ExportArguments, argv, prog="gptlab export", description=description)
    target = Path(arguments.folder)
    require_free(target)
    from gptlab.app.loaded_run import load_run
    from gptlab.runtime.records.console import Console

    with Console(stream=sys.stderr) as console:
        run = load_run(arguments.run, checkpoint=arguments.checkpoint, device="cpu", console=console)
    form, why = choose_form(run.config.model)
    export(run, target, form=form, dtype=arguments.dtype)
    print(f"{target}: step {run.step} of {run.directory.path} as {ARCHITECTURES[form]} ({why}), {arguments.dtype}")
    if form == "gptlab":
        print(
            f"load it with trust_remote_code=True: transformers then runs {target / MODELLING_MODULE}.py, "
            "which is gptlab's; people you give the folder to may want to read it first"
        )
    return 0


def export(run: LoadedRun, target: Path, *, form: Form, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write the model's folder, completely or not at all. UserError if it cannot be written."""
    import torch

    from gptlab.cli.export_card import model_card
    from gptlab.data.tokenizer.tokenizer import save_for_transformers
    from gptlab.model.interop.hf_weights import to_transformers
    from gptlab.runtime.files.strict_json import to_json
    from gptlab.runtime.files.tensor_file import write_bytes, write_tensors

    model, bos_id = run.config.model, run.tokenizer.bos_id
    masters = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in to_transformers(masters, model, form).items()}
    texts = {"README.md": model_card(run, form, n_params=sum(tensor.numel() for tensor in tensors.values()))}
    if form == "gptlab":
        texts[f"{MODELLING_MODULE}.py"] = modelling_source()
    objects = {
        "config.json": export_config(model, form, bos_id=bos_id, dtype=dtype),
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
