"""Log-likelihoods for lm-eval against the model's logits by hand, and the adapter with the library, where it is."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import train

from gptlab.app.lm_eval_model import GptlabLM, drawing_of, log_likelihoods, main
from gptlab.config.errors import UserError
from gptlab.config.model import ModelConfig
from gptlab.eval.continuation import Drawing
from gptlab.model.gpt import GPT, build_model
from gptlab.runtime.records.console import Console

SEQ_LEN, BOS = 8, 20


@pytest.fixture(scope="module")
def model() -> GPT:
    config = ModelConfig(n_layer=1, n_embd=16, n_head=2, seq_len=SEQ_LEN, vocab_size=21, vocab_multiple=7)
    model = build_model(config, device=torch.device("cpu"), compute_dtype=torch.float32, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def by_hand(model: GPT, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One token after the other."""
    total, greedy = 0.0, True
    for number, token in enumerate(continuation):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation[:number]]]))[0, -1].double()
        total += float(logits[token] - logits.logsumexp(0))
        greedy &= int(logits.argmax()) == token
    return total, greedy


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_likelihoods_are_those_of_the_logits(model: GPT, rows: int) -> None:
    """In the order of the requests, whatever their lengths; float32 sums in another shape, to 1e-5 nats of about 10."""
    pairs = [([BOS], [3]), ([BOS, 4, 5], [6, 7]), ([1], [2, 3, 4, 5, 6, 7, 8]), ([BOS, 1, 2, 3, 4, 5], [6, 7, 8])]
    greedy = [BOS, 2]
    for _ in range(3):
        with torch.no_grad():
            greedy.append(int(model(torch.tensor([greedy]))[0, -1].argmax()))
    pairs.append((greedy[:2], greedy[2:]))
    found = log_likelihoods(model, pairs, rows=rows, bos_id=BOS)
    for (total, likeliest), pair in zip(found, pairs, strict=True):
        expected = by_hand(model, *pair)
        assert total == pytest.approx(expected[0], abs=1e-5)
        assert likeliest is expected[1]
    assert found[-1][1]


def test_a_long_context_loses_its_beginning_but_not_bos(model: GPT) -> None:
    context, continuation = [BOS, *range(12)], [3, 4]
    row = [BOS, *range(6, 12), 3]  # as many inputs as the context has room for
    (found,) = log_likelihoods(model, [(context, continuation)], rows=1, bos_id=BOS)
    with torch.no_grad():
        logs = model(torch.tensor([row]))[0].double().log_softmax(-1)
    assert found[0] == pytest.approx(float(logs[-2, 3] + logs[-1, 4]), abs=1e-5)
    with pytest.raises(UserError, match="9 tokens is longer than the model's context of 8"):
        log_likelihoods(model, [([BOS], [1] * 9)], rows=1, bos_id=BOS)


class Recorded(GptlabLM):
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@pytest.mark.parametrize(("has_cuda", "device"), [(False, None), (True, "cuda:0")])
def test_the_device_that_lm_eval_gives_is_taken_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    lm = Recorded.create_from_arg_obj({"run": "x"}, {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"})
    assert lm.arguments == {"run": "x", "batch_size": 1, "max_batch_size": None, "device": device}


def test_model_args_win_over_what_lm_eval_gives() -> None:
    given = {"run": "x", "device": "cuda:1", "batch_size": 4}
    assert Recorded.create_from_arg_obj(given, {"batch_size": 1, "device": "cpu"}).arguments == given
    assert Recorded.create_from_arg_obj(given).arguments == given


class Merging(GptlabLM):
    """The longest of a few tokens, after BOS."""

    def __init__(self) -> None:
        pass

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = [BOS]
        while string:
            token = max((token for token in TOKENS if string.startswith(token)), key=len)
            ids.append(TOKENS.index(token))
            string = string[len(token) :]
        return ids


TOKENS = ["a", "t", "h", "e", "z", " ", "th", "the", "that", " a"]


@pytest.mark.parametrize(
    ("context", "continuation", "parts"),
    [
        ("th", "z", ([BOS, 6], [4])),
        ("th", "e", ([BOS], [7])),
        ("th", "eat", ([BOS], [7, 0, 1])),
        ("ath", "at", ([BOS, 0], [8])),
        ("th ", "a", ([BOS, 6], [9])),  # spaces move to the continuation, as lm-eval has it
        ("th", "", ([BOS], [6])),
    ],
)
def test_a_continuation_begins_where_encodings_part(
    context: str, continuation: str, parts: tuple[list[int], list[int]]
) -> None:
    """Never empty, which would be certain and win: a first token that merges with the context's last belongs to it."""
    assert Merging()._encode_pair(context, continuation) == parts


def test_nothing_before_a_continuation_and_no_bos() -> None:
    lm = Merging()
    lm.run = SimpleNamespace(tokenizer=SimpleNamespace(bos_id=None), directory=SimpleNamespace(path="runs/x"))  # type: ignore[assignment]
    lm.tok_encode = lambda string, **_: Merging().tok_encode(string)[1:]  # type: ignore[method-assign]
    assert lm._encode_pair("h", "e") == ([2], [3])
    with pytest.raises(UserError, match="runs/x has a tokenizer without BOS"):
        lm._encode_pair(" ", "e")


@pytest.mark.parametrize(
    ("settings", "drawing"),
    [
        ({}, Drawing(max_tokens=256, temperature=0.0)),
        ({"max_new_tokens": 3, "temperature": 0.7}, Drawing(max_tokens=3, temperature=0.7)),
        ({"max_tokens": 4, "max_completion_tokens": 5}, Drawing(max_tokens=4, temperature=0.0)),
        ({"max_gen_toks": 6, "max_new_tokens": 3, "temperature": 0.0}, Drawing(max_tokens=6, temperature=0.0)),
        ({"do_sample": False, "temperature": 0.7}, Drawing(max_tokens=256, temperature=0.0)),
        ({"do_sample": True, "top_k": 5, "top_p": 0.9}, Drawing(max_tokens=256, top_k=5, top_p=0.9)),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, Drawing(max_tokens=256, min_p=0.1)),
    ],
)
def test_generation_settings_mean_what_they_mean_in_lm_eval(settings: dict[str, Any], drawing: Drawing) -> None:
    """See `lm_eval.models.utils.normalize_gen_kwargs`."""
    assert drawing_of(settings) == replace(drawing, heal=False)


def test_settings_that_are_not_known_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    lm = Recorded()
    lm.console = Console(stream=sys.stderr)
    lm._generate = lambda context, settings: context  # type: ignore[method-assign]
    settings = [{"until": ["x"], "num_beams": 4}, {"num_beams": 2, "max_tokens": 3}]
    assert lm.generate_until([SimpleNamespace(args=("a", one)) for one in settings]) == ["a", "a"]
    assert capsys.readouterr().err.count("warning: generation settings that gptlab does not have: num_beams") == 1


def test_an_error_of_the_user_is_one_line_after_lm_evals_models_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        assert "lm_eval.models" in sys.modules
        raise UserError("no run\nin x")

    monkeypatch.setattr("gptlab.app.lm_eval_model.TemplateLM", type("TemplateLM", (), {}))
    (tmp_path / "models.py").touch()
    stand_ins = {"": {"__path__": [str(tmp_path)]}, ".__main__": {"cli_evaluate": fail}, ".api": {}, ".models": {}}
    for name, stand_in in {**stand_ins, ".api.registry": REGISTRY}.items():
        module = ModuleType(f"lm_eval{name}")
        module.__dict__.update(stand_in)
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    del sys.modules["lm_eval.models"]  # to be imported from the folder, and put back as it was
    assert main() == 2
    assert capsys.readouterr().err == "gptlab: error: no run in x\n"


REGISTRY = {"register_model": lambda name: lambda model: model}


if importlib.util.find_spec("lm_eval") is not None:

    def test_with_the_library(folder: Path) -> None:
        """What the harness asks, of a trained run: texts in, numbers and texts out."""
        run = train(folder, "asked", steps=4, sample__prompts=[])
        lm = GptlabLM.create_from_arg_obj({"run": str(run)}, {"batch_size": 3, "device": "cpu"})
        loaded, bos = lm.run, lm.run.tokenizer.bos_id

        def ids(text: str) -> list[int]:
            return loaded.tokenizer.encode(text).tolist()

        asked = [SimpleNamespace(args=pair) for pair in (("the ", "fox"), ("", "fox"), ("a quick", " dog"))]
        found = lm.loglikelihood(asked, disable_tqdm=True)
        for (total, _), text, rest in zip(found, ("the", "", "a quick"), (" fox", "fox", " dog"), strict=True):
            assert total == pytest.approx(by_hand(loaded.model, [bos, *ids(text)], ids(rest))[0], abs=1e-4)

        text = "the quick brown fox jumps over the lazy dog while naps"  # longer than a context of 32
        (rolled,) = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))], disable_tqdm=True)
        first, rest = ids(text)[:32], ids(text)[32:]
        before = first[len(rest) - 33 :]  # the last window is full: 32 inputs
        expected = by_hand(loaded.model, [bos], first)[0] + by_hand(loaded.model, before, rest)[0]
        assert rolled == pytest.approx(expected, abs=1e-4)

        settings = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
        (made,) = lm.generate_until([SimpleNamespace(args=("the quick", settings))], disable_tqdm=True)
        assert "e" not in made
        assert len(made.encode()) <= 12
        assert math.isfinite(rolled)
