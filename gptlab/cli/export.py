"""`gptlab export RUN FOLDER`: write a trained model in a form that transformers loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptlab.cli.arguments.parser import Positional, parse
from gptlab.model.interop.hf_config import ARCHITECTURES, MODELLING_MODULE, choose_form
from gptlab.runtime.files.staged_folder import require_free


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportArguments:
    run: Positional[str]
    """Folder of the run, such as runs/NAME."""
    folder: Positional[str]
    """Folder to write; it must not exist, or be empty and not the current one."""
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
    from gptlab.app.foreign_models import WITHOUT_MASK, export
    from gptlab.app.run.loaded_run import load_run
    from gptlab.runtime.records.console import Console

    with Console(stream=sys.stderr) as console:
        run = load_run(arguments.run, checkpoint=arguments.checkpoint, device="cpu", console=console)
    form, why = choose_form(run.config.model)
    export(run, target, form=form, dtype=arguments.dtype)
    print(f"{target}: step {run.step} of {run.directory.path} as {ARCHITECTURES[form]} ({why}), {arguments.dtype}")
    if arguments.dtype == "float32" and run.config.runtime.dtype == "float64":
        print("warning: the weights are float64, and were rounded")
    if run.config.data.mask_documents:
        print(f"warning: {WITHOUT_MASK}")
    if form == "gptlab":
        print(
            f"load it with trust_remote_code=True: transformers then runs {target / MODELLING_MODULE}.py, "
            "which is gptlab's; people you give the folder to may want to read it first"
        )
    return 0
