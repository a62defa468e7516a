"""A run that was really trained, judged by processes that really answer."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import run_forked
from judged import CPU, HONEST, MODEL, SEED, judged_program, questions, questions_of, written_candidate
from mutations.mutation import ROOT
from tiny_runs import arguments, command, make_config, train, write_corpus

from gptlab.app import answers
from gptlab.config.load import config_from_json
from gptlab.data.prepare import prepare
from gptlab.lab.experiments.proposal import copy_package
from gptlab.lab.judge.audits import check_draws, check_time
from gptlab.lab.judge.judging import Baseline, _copy_of, _stage, check_config, judge_run
from gptlab.lab.judge.protocol import Answer, Draw
from gptlab.lab.judge.rules import RuleError
from gptlab.lab.judge.supervise import Limits, candidate_environment, copy_compiled, supervise
from gptlab.lab.judge.tree_rules import check_change, read_change
from gptlab.lab.removals import judge_leftovers
from gptlab.lab.run_record import read_run
from gptlab.model.gpt import build_model
from gptlab.model.kernels import library, ops
from gptlab.runtime.files.cache import cache_root
from gptlab.runtime.records.console import Console
from gptlab.training.checkpoint.load import load_newest

LIMITS = Limits(wall_seconds=120, cpu_seconds=60, memory_bytes=2**31)
FIELDS = {"sample.prompts": [""], "eval.tokens": 901}


def judged(folder: Path, run: Path, tree: Path = ROOT):  # type: ignore[no-untyped-def]
    values = json.loads((run / "config.json").read_text())
    config = config_from_json(values)
    asked = questions_of(make_config(folder, "x", **{"eval__tokens": 901}))
    return judge_run(
        run, asked, tree=tree, limits=LIMITS, baseline=Baseline(config=values, model=config.model),
        hidden=[folder / "cache", folder / "corpus"], cache=folder / "built", log=folder / "log.txt",
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    write_corpus(folder / "corpus", documents=60)
    prepare(make_config(folder, "x").data, make_config(folder, "x").tokenizer)  # candidates cannot write the cache
    copy_compiled(cache_root(None) / "compile", folder / "built" / "compile")
    return folder


def test_an_honest_run_is_judged_as_eval_measures_it(texts: Path) -> None:
    run = train(texts, "honest", sample__prompts=(), eval__tokens=901)
    found = judged(texts, run)
    code, out, _ = command(["eval", run, "--json"])
    measured = json.loads(out)
    assert code == 0
    loss = found.loss
    assert (loss.target_tokens, loss.target_bytes) == (measured["target_tokens"], measured["target_bytes"])
    assert loss.val_bpb == pytest.approx(measured["val_bpb"], rel=1e-6)
    assert loss.val_loss == pytest.approx(measured["val_loss"], rel=1e-6)
    assert (found.step, found.largest_difference) == (measured["step"], 0.0)
    assert found.parameters == sum(map(torch.numel, load_newest(run / "checkpoints", print).model.values()))


def test_nothing_but_weights_configuration_and_tokenizer_is_given(tmp_path: Path) -> None:
    """No moments, no state, no name of the run."""
    names = "sorted(name for _, _, files in os.walk(run) for name in files)"
    lists = f'print({names}, file=sys.stderr)\nwrite(b"RDY1"'
    judged_program(tmp_path, ('write(b"RDY1"', lists), run=written_candidate(tmp_path / "run"))
    expected = ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "run.json", "state.json",
                "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    assert (tmp_path / "log.txt").read_text() == f"{expected}\n" * 2
    assert "optimizer" not in HONEST


@pytest.mark.parametrize("products", ["kernels", "library", "weights" * 1000, None])
def test_answers_are_computed_by_what_multiplied_in_training(tmp_path: Path, products: object) -> None:
    """And nothing else of what run.json says of implementations is given."""
    run = written_candidate(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    found = {"products": products, "kernels": "x" * 1000}
    (run / "run.json").write_text(json.dumps(record | {"device": "cpu", "implementations": found}))
    staged = _stage(tmp_path / "staged", read_run(run), 10, {}, questions())
    known = {"products": products} if products in ("kernels", "library") else None
    assert json.loads((staged / "run.json").read_text()).get("implementations") == known


def test_drawing_first_weights_changes_nothing_of_what_computes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another type would be built by each process: four seconds of a core, twice for each run."""
    asked: list[str] = []
    monkeypatch.setattr(library, "kernel_library", lambda activations: asked.append(activations) or library.Library())

    def load_run(run: str, console: Console) -> SimpleNamespace:
        model = build_model(MODEL, device=CPU, compute_dtype=torch.bfloat16, seed=SEED)
        ops.multiply_by("library")
        return SimpleNamespace(model=model, config=SimpleNamespace(model=MODEL), device=CPU)

    def serve(questions: object, answers: object, answer: Answer, initial: Draw) -> None:
        assert set(check_draws(MODEL, SEED + 1, initial(SEED + 1))) > {"token_embedding.weight"}
        assert (set(asked), ops.products()) == ({"bfloat16"}, "library")

    monkeypatch.setattr("gptlab.app.run.loaded_run.load_run", load_run)
    monkeypatch.setattr("gptlab.lab.judge.protocol.serve", serve)
    done = run_forked(lambda: answers.main("a run"))
    assert done.returncode == 0, done.stderr


def test_each_answering_process_has_a_copy_of_compiled_code_to_itself(tmp_path: Path) -> None:
    """It computes with the kernels that training had, may build others, and finds nothing of another process."""
    built = tmp_path / "built" / "kernel.so"
    built.parent.mkdir()
    built.touch()
    cache = 'os.environ["GPTLAB_CACHE"]'
    adds = f'print(os.listdir({cache}), file=sys.stderr)\nopen({cache} + "/another.so", "w")\nwrite(b"RDY1"'
    judged_program(tmp_path, ('write(b"RDY1"', adds), cache=built.parent)
    assert (tmp_path / "log.txt").read_text() == "['kernel.so']\n" * 2
    assert [*built.parent.iterdir()] == [built]


def test_the_copy_of_a_judge_at_work_is_kept_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gptlab clean` deletes what has not changed for an hour; shared libraries are loaded from the copy."""
    built = tmp_path / "built"
    built.mkdir(mode=0o755)
    os.utime(built, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _copy_of(built):
        (left,) = judge_leftovers()
        assert left.kept is not None
        assert left.path.stat().st_mode & 0o777 == 0o700


def test_the_configuration_must_be_the_baselines() -> None:
    baseline = {"seed": 1, "data.source": ["a"], "model.n_embd": 4, "horizon.amount": 9, "run_dir": "x"}
    check_config({**baseline, "model.n_embd": 8, "horizon.amount": 7, "run_dir": "y", "model.mine": 1}, baseline)
    for name, value in (("seed", 2), ("data.source", ["b"])):
        with pytest.raises(RuleError, match=name):
            check_config({**baseline, name: value}, baseline)


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/everybody")
    found = candidate_environment(Path("/tree"), Path("/cache"))
    assert not {"SECRET_TOKEN", "TORCHINDUCTOR_CACHE_DIR"} & set(found)
    assert (found["OMP_NUM_THREADS"], found["PYTHONPATH"], found["GPTLAB_CACHE"]) == ("3", "/tree", "/cache")
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "what number a device has depends on it"


# --- the whole way of a proposal, with the processes of a real lab

CHANGES = {
    "another activation": (
        None, "model/gpt.py", "mlp(x, self.up, ACTIVATIONS[self.activation], self.out)", "self.out(self.up(x).sin())",
    ),
    "another norm": (
        None, "model/gpt.py", "return implementation(x).rms_norm(x, self.eps)",
        "return x / (x.abs().mean(-1, keepdim=True) + self.eps)",
    ),
    "looks ahead in evaluation mode": (
        "causality", "model/gpt.py", "x = self.token_embedding(tokens)",
        "x = self.token_embedding(tokens if self.training else tokens.roll(-1, 1))",
    ),
    "another seed": ("seed", "model/init.py", "zlib.crc32(name.encode())", "zlib.crc32(name.encode()) + 1"),
    "trains at import": (
        "cpu-time", "model/gpt.py", "GATE_CHANNELS = 32",
        "GATE_CHANNELS = 32\nimport time\nwhile time.process_time() < 22: pass\n",
    ),
    "patches the scorer": (
        "report", "training/compilation.py", "nats_of(state.model))",
        "lambda tokens, targets: 0.9 * nats_of(state.model)(tokens, targets))",
    ),
    "reads the judge's files": (
        "private-files", "model/gpt.py", "GATE_CHANNELS = 32", "GATE_CHANNELS = 32\nopen('PRIVATE').read()",
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("name", CHANGES)
def test_a_proposal_from_its_code_to_its_verdict(name: str, texts: Path, tmp_path: Path) -> None:
    rule, file, old, new = CHANGES[name]
    private = tmp_path / "private"
    private.mkdir()
    (private / "ledger.jsonl").write_text("{}\n")
    changed = tmp_path / "changed"
    copy_package(ROOT, changed)
    path = changed / "gptlab" / file
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new.replace("PRIVATE", str(private / "ledger.jsonl"))))

    tree, runs = tmp_path / "tree", tmp_path / "runs"
    runs.mkdir()

    def verdict() -> None:
        change = read_change(ROOT, changed)
        check_change(change)
        assert change.names == [file]
        copy_package(changed, tree)
        argv = [sys.executable, "-m", "gptlab", "train", *arguments(texts, "x", FIELDS | {"run_dir": runs / "run"})]
        finished = supervise(
            argv, cwd=runs, environment=candidate_environment(tree, cache_root(None)), limits=LIMITS,
            log=tmp_path / "log.txt", hidden=[private], readable=[tree, texts], writable=[runs],
        )  # fmt: skip
        finished.require_lawful("training")
        assert finished.exit_code == 0, (tmp_path / "log.txt").read_text()[-2000:]
        check_time(finished, cpu_seconds=10, wall_seconds=120)
        judged(texts, runs / "run", tree)

    if rule is None:
        verdict()
    else:
        with pytest.raises(RuleError) as caught:
            verdict()
        assert caught.value.rule == rule, caught.value
