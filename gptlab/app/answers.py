"""`python -m gptlab.app.answers RUN`: a trained run answers the judge, tokens in and logits out (`lab/judge/protocol`).

It runs the candidate's code, in a process of its own. It sees the run's weights, configuration and tokenizer, and the
tokens that it is asked about.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def main(run: str) -> None:
    """Answer until the input ends. UserError where the run cannot be loaded."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what any code prints is no answer, also while it is imported
    gc.set_threshold(100_000)  # before torch is imported: see gptlab/cli/main.py
    import numpy as np
    import torch

    from gptlab.app.run.loaded_run import load_run
    from gptlab.lab.judge.protocol import serve
    from gptlab.model.gpt import build_model
    from gptlab.model.kernels.ops import implementations_kept
    from gptlab.runtime.hardware.device import keep_freed_memory
    from gptlab.runtime.records.console import Console

    keep_freed_memory()  # every answer takes the same
    loaded = load_run(run, console=Console(stream=sys.stderr))

    @torch.no_grad()
    def answer(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        rows = torch.from_numpy(tokens.astype(np.int64)).to(loaded.device)
        return loaded.model(rows).float().cpu().numpy()

    def initial(seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
        # As the loaded model was built: for another device or type, kernels would have to be built first.
        dtype = loaded.model.compute_dtype
        with implementations_kept():
            model = build_model(loaded.config.model, device=loaded.device, compute_dtype=dtype, seed=seed)
        for name, values in model.named_parameters():
            yield name, values.detach().cpu().numpy()

    serve(sys.stdin.buffer, answers, answer, initial)
    gc.freeze()  # garbage is collected once more at exit, among all objects of torch


if __name__ == "__main__":
    main(sys.argv[1])
