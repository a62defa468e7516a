"""`gptlab sample` with several samples, and as a conversation: --samples, --top-p, --min-p, --interactive."""

from __future__ import annotations

import io
import json

import pytest
from test_cli_eval_sample import Run, make_run, printed

from gptlab.cli.main import main
from gptlab.eval.sampling import sample_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("talk"))


class TestSeveralSamples:
    def test_the_first_is_what_one_alone_is(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("sample", run.path, "--prompt", "the", "fox", "--temperature", 1.5, "--max-tokens", 15, "--json")
        alone = json.loads(printed(capsys, *words))["samples"]
        three = json.loads(printed(capsys, *words, "--samples", 3))["samples"]
        assert [sample["prompt"] for sample in three] == ["the"] * 3 + ["fox"] * 3
        assert three[::3] == alone
        assert len({sample["text"] for sample in three}) == 6

    def test_top_p_and_min_p_of_nearly_nothing_are_greedy(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("sample", run.path, "--prompt", "the", "--max-tokens", 15, "--top-k", 0)
        greedy = printed(capsys, *words, "--temperature", 0)
        for flags in (("--top-p", 1e-6), ("--min-p", 0.999)):
            assert printed(capsys, *words, "--temperature", 1, *flags) == greedy


class TestInteractive:
    def talk(self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return printed(capsys, "sample", run.path, "--interactive", "--temperature", 1, "--max-tokens", 8)

    def test_prompts_settings_and_fences(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Greedy from the second text on; the third has two lines."""
        out = self.talk(
            run, capsys, monkeypatch, "the", "/temperature 0", "fox", '"""', "two", 'lines"""', "/quit", "no"
        )
        seed = run.config.seed
        first = "".join(sample_text(run.models[30], run.tokenizer, "the", max_tokens=8, top_k=50, seed=seed))
        fox, lines = (
            "".join(sample_text(run.models[30], run.tokenizer, prompt, max_tokens=8, temperature=0.0))
            for prompt in ("fox", "two\nlines")
        )
        assert out == f"the{first}\ntemperature 0.0\nfox{fox}\ntwo\nlines{lines}\n"

    def test_a_fenced_text_is_never_a_command_and_may_end_with_the_input(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = self.talk(run, capsys, monkeypatch, "/temperature 0", '"""/quit"""', '"""', "two", "lines")
        quit_, lines = (
            "".join(sample_text(run.models[30], run.tokenizer, prompt, max_tokens=8, temperature=0.0))
            for prompt in ("/quit", "two\nlines")
        )
        assert out == f"temperature 0.0\n/quit{quit_}\ntwo\nlines{lines}\n"

    def test_a_prompt_entered_again_gives_another_text(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second, back, again = self.talk(run, capsys, monkeypatch, "the", "the", "/seed 0", "the").splitlines()
        assert first != second
        assert back == "seed 0"
        assert (again == first) == (run.config.seed == 0)

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("/temprature 1", "nearest: /temperature"),
            ("/top_p 2", "(0, 1]"),
            ("/samples 0", "below"),
            ("/max_tokens 0", "below"),
            ("/x", "/help"),
        ],
    )
    def test_mistakes_are_one_line(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, words: str
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
        assert main(["sample", str(run.path), "--interactive"]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err
        assert len([text for text in captured.err.splitlines() if text.startswith("gptlab:")]) == 1

    def test_a_top_k_of_zero_is_all(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "top_k none" in self.talk(run, capsys, monkeypatch, "/top_k 0")

    def test_a_prompt_on_the_command_line_is_refused(self, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["sample", str(run.path), "--interactive", "--prompt", "the"]) == 2
        assert "leave out torchrun, --json and --prompt" in capsys.readouterr().err

    def test_help_shows_what_is_set(
        self, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = self.talk(run, capsys, monkeypatch, "/help")
        assert "/temperature 1.0" in out
        assert "/top_k 50" in out
        assert all(len(line) <= 80 for line in out.splitlines())
