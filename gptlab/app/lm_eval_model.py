"""A trained run as a model of lm-eval (EleutherAI's lm-evaluation-harness), without conversion.

    python -m gptlab.app.lm_eval_model --model gptlab --model_args run=runs/NAME --tasks hellaswag

takes every argument of `lm_eval`. `model_args` may also have checkpoint, device and dtype, as `gptlab eval` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from gptlab.app.run.loaded_run import load_run
from gptlab.config.errors import EXIT_USAGE, UserError, one_line
from gptlab.data.packing import IGNORED
from gptlab.eval.bits_per_byte import evaluation_mode, rows_of_pass, token_nats
from gptlab.eval.continuation import Drawing, continue_text, text_of
from gptlab.model.gpt import GPT
from gptlab.runtime.records.console import Console

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # `log_likelihoods` goes without
    TemplateLM = object

GENERATED_TOKENS = 256
"""Of a request that gives no limit, as lm-eval's models for transformers."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for one setting. Where several are given, the first of these holds, as in lm-eval."""
SETTINGS = ("until", "do_sample", "temperature", "top_k", "top_p", "min_p")


class GptlabLM(TemplateLM):
    """What lm-eval asks of a model. It encodes context and continuation together, as for other causal models."""

    def __init__(
        self,
        run: str,
        checkpoint: str = "latest",
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.console = Console(stream=sys.stderr)
        self.run = load_run(run, checkpoint=str(checkpoint), device=device, dtype=dtype, console=self.console)
        given = str(batch_size).isdigit() and int(str(batch_size))
        self.rows = given or rows_of_pass(self.run.config, self.run.device)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> GptlabLM:
        """What model_args (`arg_dict`) have wins over lm-eval's own arguments."""
        others = dict(additional_config or {})
        # Where no device was given, lm-eval passes its default, cuda:0, on every machine.
        if str(others.get("device")).startswith("cuda") and not torch.cuda.is_available():
            others["device"] = None
        return cls(**{**others, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> GptlabLM:
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        if (bos_id := self.run.tokenizer.bos_id) is None:
            raise UserError(f"{self.run.directory.path} has a tokenizer without BOS: it cannot begin with nothing")
        return bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids, after BOS, if there is one."""
        ids = self.run.tokenizer.encode(string).tolist()
        bos_id = self.run.tokenizer.bos_id
        return ids if bos_id is None or add_special_tokens is False else [bos_id, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of the whole text, parted where it no longer begins as the context alone does: at a token that covers the
        border the continuation, which is never empty, begins with it. Spaces that end the context are moved there, as
        in lm-eval. UserError where nothing is left before it, not even BOS."""
        text = context.rstrip()
        whole = self.tok_encode(context + continuation)
        pairs = zip(whole[:-1], self.tok_encode(text), strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return whole[:shared] or [self.eot_token_id], whole[shared:]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return log_likelihoods(self.run.model, pairs, rows=self.rows, bos_id=self.run.tokenizer.bos_id)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in lm-eval's windows, which overlap by one token; those of `gptlab eval` by half."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        seq_len, found = self.run.config.model.seq_len, []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.eot_token_id, max_seq_len=seq_len, context_len=1)
            parts = self._loglikelihood_tokens([(None, *make_disjoint_window(window)) for window in windows])
            found.append(sum(likelihood for likelihood, _ in parts))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        if unknown := {name for request in requests for name in request.args[1]} - {*LIMITS, *SETTINGS}:
            self.console.warn(f"generation settings that gptlab does not have: {', '.join(sorted(unknown))}")
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """The continuation, up to the first of its stops."""
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        drawing = drawing_of(settings)
        text = ""
        (stream,) = continue_text(self.run.model, self.run.tokenizer, context, drawing, seed=self.run.config.seed)
        for piece in text_of(stream):
            text += piece
            if places := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(places)]
        return text


def drawing_of(settings: Mapping[str, Any]) -> Drawing:
    """What lm-eval's generation settings mean, as for its other models. Greedy unless `do_sample` is set or, where it
    is not given, a temperature above 0 is."""
    given = {name: value for name, value in settings.items() if value is not None}
    is_sampled = given.get("do_sample", float(given.get("temperature", 0.0)) > 0)
    return Drawing(
        max_tokens=int(next((given[name] for name in LIMITS if name in given), GENERATED_TOKENS)),
        temperature=float(given.get("temperature", 1.0)) if is_sampled else 0.0,
        top_k=given.get("top_k") or None,
        top_p=float(given.get("top_p", 1.0)),
        min_p=float(given.get("min_p", 0.0)),
        heal=False,  # other models continue the tokens of the prompt as they are
    )


def log_likelihoods(
    model: GPT, pairs: Sequence[tuple[list[int], list[int]]], *, rows: int, bos_id: int | None
) -> list[tuple[float, bool]]:
    """For each (context, continuation), both of token ids, none empty: the sum over the continuation's tokens of their
    log-probability in nats, and whether each is the likeliest one.

    A context that is too long loses its beginning, but not its BOS. UserError for a continuation that is longer than
    the model's context. `rows`: how many are computed at once, which changes the speed only.
    """
    seq_len, device = model.config.seq_len, next(model.parameters()).device
    found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    with evaluation_mode(model):
        for numbers in _by_length(pairs, rows):
            cut = [_cut(*pairs[number], seq_len, bos_id) for number in numbers]
            longest = max(len(inputs) for inputs, _ in cut)
            # Padding after a row, which no prediction sees.
            inputs, targets = (
                np.array([np.pad(one[part], (0, longest - len(one[part])), constant_values=fill) for one in cut])
                for part, fill in ((0, 0), (1, IGNORED))
            )
            logits, wanted = model(torch.from_numpy(inputs).to(device)), torch.from_numpy(targets).to(device)
            sums = -token_nats(logits, wanted).double().sum(1)
            greedy = ((logits.argmax(-1) == wanted) | (wanted == IGNORED)).all(1)
            for number, total, likeliest in zip(numbers, sums.tolist(), greedy.tolist(), strict=True):
                found[number] = (total, likeliest)
    return found


def _by_length(pairs: Sequence[tuple[list[int], list[int]]], rows: int) -> Iterator[list[int]]:
    """Numbers of pairs, `rows` at a time, the longest first, so that memory runs out at once or not at all."""
    order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]) - len(pairs[number][1]))
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def _cut(context: list[int], continuation: list[int], seq_len: int, bos_id: int | None) -> tuple[list[int], list[int]]:
    """Inputs and targets of one row, at most `seq_len` each."""
    if len(continuation) > seq_len:
        raise UserError(f"a continuation of {len(continuation)} tokens is longer than the model's context of {seq_len}")
    inputs = [*context, *continuation][:-1]
    if len(inputs) > seq_len:
        starts = [bos_id] if bos_id is not None and context[0] == bos_id and len(continuation) < seq_len else []
        inputs = [*starts, *inputs[len(inputs) - seq_len + len(starts) :]]
    return inputs, [*[IGNORED] * (len(inputs) - len(continuation)), *continuation]


def main() -> int:
    """`lm_eval` with gptlab among its models. A UserError becomes one line on stderr and exit code 2."""
    try:
        if TemplateLM is object:
            raise UserError("lm-eval is not installed: pip install lm-eval")
        import lm_eval.models  # noqa: F401 lm-eval does so itself only while no model is registered
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import register_model

        register_model("gptlab")(GptlabLM)
        cli_evaluate()
    except UserError as error:
        print(f"gptlab: error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
