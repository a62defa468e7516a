"""Command lines to values: the same surface as tyro's, one line for every mistake, recipe < TOML < flags."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from gptlab.app.run import run_request
from gptlab.app.run.run_request import RunArguments, RunRequest, TrainArguments
from gptlab.cli import main as cli
from gptlab.cli.arguments.parser import Positional, parse, read_request, read_words
from gptlab.cli.arguments.run_help import recipe_list
from gptlab.config.errors import UserError
from gptlab.config.length import HORIZONS, Horizon
from gptlab.config.load import apply_overrides, leaf_fields
from gptlab.config.model import ModelConfig
from gptlab.config.recipes import RECIPES
from gptlab.config.run import EvalConfig, RunConfig
from gptlab.config.scaling import Machine

MACHINE = Machine(device="cpu", flops_per_second=1e11)


@dataclass(frozen=True)
class Everything:
    run: Positional[tyro.conf.Positional[str]]
    """Run directory."""
    max_tokens: int = 100
    """Tokens."""
    temperature: float = 1.0
    kind: Literal["hash", "tail"] = "hash"
    top_k: int | None = None
    flag: bool = False
    other: bool = True
    prompts: tuple[str, ...] = ()
    folder: Path | None = None


def read(*argv: str) -> Everything:
    return parse(Everything, argv, prog="gptlab test", description="Test.")


class TestParse:
    def test_by_hand(self) -> None:
        assert read(
            "r", "--max-tokens", "5", "--top_k=7", "--no-other", "--flag", "--prompts", "a b", "c"
        ) == Everything(run="r", max_tokens=5, top_k=7, other=False, flag=True, prompts=("a b", "c"))
        assert read("--temperature", "-1", "--folder", "x", "r") == Everything(
            run="r", temperature=-1.0, folder=Path("x")
        )

    def test_more_than_tyro_takes(self) -> None:
        """True and False in words, whole numbers in scientific notation, tuples in several pieces."""
        assert read("r", "--flag", "true", "--other", "off").flag
        assert not read("r", "--flag", "true", "--other", "off").other
        assert not read("r", "--other", "False").other
        assert read("--flag", "True", "r").flag
        assert read("r", "--max-tokens", "1e6").max_tokens == 1_000_000
        assert read("r", "--prompts", "a", "--flag", "--prompts", "b").prompts == ("a", "b")
        assert read("r", "--top-k", "3", "--top-k", "none").top_k is None

    def test_a_truth_word_after_a_boolean_is_its_value(self) -> None:
        """nanoGPT's `--compile=False`: the flag is off, and the word is not a positional."""
        for word in ("False", "false", "FALSE", "off", "Off"):
            for argv in (("--other", word, "r"), (f"--other={word}", "r"), ("r", "--other", word)):
                assert not read(*argv).other
                assert read(*argv).run == "r"
        for word in ("True", "true", "on"):
            assert read("--no-other", "--other", word, "r").other
            assert read("r", f"--flag={word}").flag
        assert read("--flag", "r").flag  # any other word is not its value
        assert read("--flag", "r").run == "r"
        with pytest.raises(UserError, match="'False' is one word too many"):
            read("r", "--no-other", "False")

    @settings(max_examples=15)  # tyro takes 0.03 s for each
    @given(
        run=st.text("abc./", min_size=1),
        number=st.integers(-(2**62), 2**62),
        real=st.floats(allow_nan=False, allow_infinity=False),
        kind=st.sampled_from(["hash", "tail"]),
        top_k=st.sampled_from(["None", "4"]),
        flags=st.lists(st.sampled_from(["--flag", "--no-flag", "--other", "--no-other"]), max_size=3),
        prompts=st.lists(st.text("ab =,.\n", min_size=1), max_size=3),
    )
    def test_tyro_reads_the_same(
        self, run: str, number: int, real: float, kind: str, top_k: str, flags: Sequence[str], prompts: Sequence[str]
    ) -> None:
        argv = [run, "--max-tokens", str(number), f"--temperature={real!r}", "--kind", kind, "--top_k", top_k, *flags]
        argv += ["--prompts", *prompts]
        assert read(*argv) == tyro.cli(Everything, args=argv)

    def test_tyro_reads_a_whole_run_the_same(self) -> None:
        """Every field of a run, each with a value that is not its default where one is at hand."""
        texts = {
            "runtime.device": "cpu", "run_dir": "runs/x", "batch.total_tokens": "32768", "seed": "3",
            "model.n_layer": "3", "horizon.unit": "steps",  # which is what runs of the same bits are measured in
        }  # fmt: skip
        argv = []
        for name, value in {name: _leaf(RunConfig(), name) for name in leaf_fields(RunConfig)}.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                stem, _, last = flag.rpartition(".")
                is_on = value or name == "parallel.reduce_each_micro_batch"  # not with exact_any_world_size
                argv.append(f"{stem}.no-{last}" if is_on else flag)
            else:
                argv += [flag, *(value if isinstance(value, tuple) else [texts.get(name, str(value))])]
        ours = apply_overrides(RunConfig(), read_words(argv, leaf_fields(RunConfig)))
        assert ours == tyro.cli(RunConfig, args=argv)
        assert not ours.model.qk_norm
        assert ours.batch.total_tokens == 32768

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            ("r --max-tokens x", "max_tokens = 'x': must be a whole number"),
            ("r --max-tokens 1.5", "max_tokens = '1.5': must be a whole number"),
            ("r --temperature nan", "temperature = nan: must be a finite number"),
            ("r --kind hasp", "kind = 'hasp': must be one of hash, tail (nearest valid: hash)"),
            ("r --max-tokenz 3", "--max-tokenz: there is no such option (nearest: --max-tokens)"),
            ("r --max-tokens", "--max-tokens needs a value: a whole number"),
            ("r --max-tokens --flag", "--max-tokens needs a value"),
            ("r --flag=maybe", "flag = 'maybe': must be True or False"),
            ("r q", "'q' is one word too many"),
            ("r --top-k x", "a whole number, or none"),
            ("-max-tokens 3 r", "there is no such option (nearest: --max-tokens)"),
            ("r --zzzz", "(see --help)"),
            ("", "gptlab test needs RUN"),
        ],
    )
    def test_mistakes_are_one_line(self, argv: str, says: str) -> None:
        with pytest.raises(UserError) as caught:
            read(*argv.split())
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_help_names_arguments_with_their_defaults(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            read("--help")
        assert caught.value.code == 0
        text = capsys.readouterr().out
        for part in (
            "gptlab test", "  RUN\n", "  --max-tokens N [100]\n      Tokens.\n", "Run directory.", "hash|tail [hash]",
            "--other, --no-other [on]", "--prompts TEXT ...\n",
        ):  # fmt: skip
            assert part in text


def _leaf(config: object, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def small(*, depth: int | None = None, horizon: Horizon | None = None) -> RunConfig:
    """A small run.

    With a longer story."""
    depth = depth or 4
    return RunConfig(
        recipe="small",
        model=ModelConfig(n_layer=depth, n_embd=64 * depth, n_head=depth),
        horizon=horizon or Horizon(amount=10.0, unit="seconds"),
        eval=EvalConfig(every_steps=5),
    )


def quickstart(*, depth: int | None = None, horizon: Horizon | None = None) -> RunConfig:
    """The default."""
    return small(depth=depth, horizon=horizon)


@pytest.fixture(autouse=True)
def recipes() -> Iterator[None]:
    """These two alone; afterwards all others in their order."""
    table = cast(dict[str, Any], RECIPES)
    saved = dict(table)
    table.clear()
    table |= {"quickstart": quickstart, "small": small}
    yield
    table.clear()
    table |= saved


def request(line: str = "") -> RunRequest:
    return read_request(shlex.split(line), TrainArguments, prog="gptlab train", description="Train.")


def resolve(line: str = "") -> RunConfig:
    return request(line).config(lambda _: MACHINE)


class TestRunRequest:
    def test_nothing_is_the_default_recipe(self) -> None:
        assert request() == RunRequest()
        assert resolve() == quickstart()

    def test_short_forms_by_hand(self) -> None:
        config = resolve(
            "small --depth 6 --minutes 3 --until-val-loss 1.88 --data a,b --data c --seed 5 --run-dir runs/x "
            "--device cpu --dtype float32 --compile"
        )
        assert config.recipe == "small"
        assert (config.model.n_layer, config.model.n_embd) == (6, 384)
        assert config.horizon == Horizon(amount=180.0, unit="seconds", until_val_loss=1.88)
        assert config.data.source == ("a", "b", "c")
        assert (config.seed, config.run_dir) == (5, "runs/x")
        assert (config.runtime.device, config.runtime.dtype, config.runtime.compile) == ("cpu", "float32", "on")
        assert resolve("--compile off").runtime.compile == resolve("--compile=False").runtime.compile == "off"
        assert resolve("--compile true").runtime.compile == "on"
        assert resolve("--steps 9 --exact-any-world-size").parallel.exact_any_world_size
        assert not resolve("--steps 9 --exact-any-world-size --no-exact-any-world-size").parallel.exact_any_world_size

    def test_a_mode_that_resumes_a_run_brings_its_own_copies(self) -> None:
        stored = apply_overrides(RunConfig(), {"parallel.mode": "sharded", "parallel.shard_ranks": 8})

        def resumed(**asked: object) -> tuple[str, int | None]:
            request = RunRequest(overrides={f"parallel.{name}": value for name, value in asked.items()})
            parallel = request.resumed(stored).parallel
            return parallel.mode, parallel.shard_ranks

        assert resumed() == ("sharded", 8)
        assert resumed(shard_ranks=4) == resumed(mode="sharded", shard_ranks=4) == ("sharded", 4)
        assert resumed(mode="sharded") == ("sharded", None)
        assert resumed(mode="data") == ("data", None)

    @pytest.mark.parametrize(
        ("flag", "horizon"),
        [
            ("--minutes 0.5", Horizon(amount=30.0, unit="seconds")),
            ("--steps 1e3", Horizon(amount=1000, unit="steps")),
            ("--tokens 3e9", Horizon(amount=3e9, unit="tokens")),
            ("--flops 1e15", Horizon(amount=1e15, unit="flops")),
            ("--tokens-per-param 10.5", Horizon(amount=10.5, unit="tokens_per_param")),
        ],
    )
    def test_the_horizon_has_a_unit(self, flag: str, horizon: Horizon) -> None:
        assert resolve(flag).horizon == horizon

    def test_until_val_loss_keeps_the_recipes_cap(self) -> None:
        assert resolve("--until-val-loss 1.5").horizon == Horizon(amount=10.0, unit="seconds", until_val_loss=1.5)

    def test_none_is_the_value_of_a_short_form_whose_field_may_be_none(self, tmp_path: Path) -> None:
        stored = resolve("--until-val-loss 2")
        assert request("--resume x --until-val-loss none").with_length(stored).horizon.until_val_loss is None
        (tmp_path / "run.toml").write_text("until_val_loss = 2.0")
        assert resolve(f"{tmp_path / 'run.toml'} --until-val-loss none").horizon.until_val_loss is None
        assert resolve("--device none --dtype none") == quickstart()

    def test_none_is_an_empty_list(self, tmp_path: Path) -> None:
        """`--sample.prompts none` continued the text "none"."""
        path = tmp_path / "run.toml"
        path.write_text('log.to = "none"\ndata.val_source = "none"\nsample.prompts = "none"\n')
        flags = "--log.to none --data.val-source none --sample.prompts None"
        for config in (resolve(flags), resolve(str(path)), resolve(f"{path} {flags}")):
            assert (config.log.to, config.data.val_source) == ((), ())
            assert (config.sample.prompts, config.sample.from_validation) == ((), 0)
        assert resolve("--sample.prompts all none").sample.prompts == ("all", "none")
        assert resolve("--sample.prompts=none --sample.prompts=--x").sample.prompts == ("none", "--x")
        assert resolve("--data none").data.source == ("none",)

    def test_dotted_fields_in_either_spelling(self) -> None:
        config = resolve("--model.n-layer 6 --optim.muon.lr=0.5 --model.no_qk_norm --model.n_embd 96")
        assert (config.model.n_layer, config.optim.muon.lr, config.model.qk_norm, config.model.n_embd) == (
            6, 0.5, False, 96,
        )  # fmt: skip

    def test_resume_and_list(self) -> None:
        assert request("--resume runs/x").resume == "runs/x"
        assert request("--list").options["list"]
        with pytest.raises(UserError, match="no such field"):
            read_request(["--resume", "x"], RunArguments, prog="gptlab plan", description="Plan.")

    def test_from(self) -> None:
        asked = request("--from runs/x --steps 5 --seed 2")
        assert (asked.from_run, asked.recipe) == ("runs/x", None)
        assert asked.overrides == {"seed": 2, "horizon.amount": 5.0, "horizon.unit": "steps"}

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            ("small --from runs/x", "--from runs/x and small both say what to train: give one of them"),
            ("--from runs/x --resume runs/y", "--from runs/x and --resume runs/y both say what to train"),
            (
                "--tokenizer.path t --tokenizer.vocab-size 512",
                "tokenizer.path names a finished one: give one of them",
            ),
            ("night.toml --from runs/x", "--from runs/x and night.toml both say"),
            ("--from", "--from needs a value"),
            ("--minutes -1", "minutes = -1.0: a run trains for a positive number of minutes"),
            ("--minutes 0", "minutes = 0.0"),
            ("--depth 0", "depth = 0: must be greater than zero"),
            ("--steps 2.5", "steps = '2.5': must be a whole number"),
            ("--minutes 3 --steps 5", "--minutes and --steps both say how long to train"),
            ("--tokens-per-param 3 --flops 5", "--flops and --tokens-per-param both say"),
            ("--runtime.dtype bfloat16 --dtype float32", "--dtype and --runtime.dtype are one field: give one of them"),
            ("smal", "'smal' is neither a recipe nor a .toml file: did you mean small?"),
            ("zzz", "there are quickstart, small"),
            ("small more", "'more' is one word too many"),
            ("--model.n-layers 6", "--model.n-layers = '6': there is no such field (nearest valid: --model.n-layer)"),
            (
                "--warmup_steps 10",
                "there is no --warmup-steps here: a share of the run, not steps: --schedule.warmup",
            ),
            ("--n-head 6", "(nearest valid: --model.n-head)"),
            (
                "--max_iters 9 --steps 9 --block-size=8 small",
                "there is no --max-iters here: --steps N; there is no --block-size here: --model.seq-len N",
            ),
            ("--minute 6 --depth", "(nearest valid: --minutes); --depth needs a value"),
            ("--minute 6", "(nearest valid: --minutes)"),
            ("--model 6", "--model = '6': is a group of fields"),
            ("--model.n-layer six", "model.n_layer = 'six': must be a whole number"),
            ("--model.norm rmsnrm", "model.norm = 'rmsnrm': must be one of rmsnorm, layernorm (nearest valid: rms"),
            ("--model.n-layer", "--model.n-layer needs a value"),
            ("--compile maybe", "must be one of auto, on, off"),
            ("--device gpu", "runtime.device = 'gpu'"),
            ("--model.n-head 3", "model.n_head = 3: heads must divide the width n_embd = 256"),
            ("--model.window-pattern SXL", "model.window_pattern = 'SXL'"),
            ("--batch.total-tokens 100", "batch.total_tokens = 100: must be a multiple of"),
            ("--optim.embedding.lr -1", "optim.embedding.lr = -1.0"),
            ("missing.toml", "cannot read missing.toml"),
        ],
    )
    def test_mistakes_are_one_line(self, argv: str, says: str) -> None:
        with pytest.raises(UserError) as caught:
            resolve(argv)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_help_has_the_defaults_of_the_recipe_that_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            request("small --help")
        text = capsys.readouterr().out
        assert text.index("--depth") < text.index("--minutes") < text.index("--model.seq-len")
        assert "Defaults in [ ]: small;" in " ".join(text.split())

    def test_help_offers_exactly_what_is_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            request("--help-all")
        offered = set(re.findall(r"^  --([\w.-]+)", capsys.readouterr().out, re.MULTILINE))
        names = [*leaf_fields(RunConfig), *HORIZONS, *run_request.ALIASES, "depth", "resume", "from"]
        names += ["list", "quiet", "resume_from_step"]
        assert offered == {name.replace("_", "-") for name in names} - {"recipe", "recipe-arguments"}


class TestMeasure:
    @staticmethod
    def sized(*, depth: int | None = None, horizon: Horizon | None = None, machine: Machine | None = None) -> RunConfig:
        """As deep as the machine is fast."""
        flops = machine.flops_per_second if machine is not None else None
        return small(depth=depth or round(math.log10(flops or 1e4)), horizon=horizon)

    def test_a_recipe_that_sizes_itself_gets_the_measured_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RECIPES, "sized", self.sized)
        assert resolve("sized").model.n_layer == 11

    def test_nothing_is_measured_where_nothing_depends_on_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(RECIPES, "sized", self.sized)

        def measure(config: RunConfig) -> Machine:
            raise AssertionError("measured")

        assert request("sized --depth 3").config(measure).model.n_layer == 3
        assert request("small").config(measure).model.n_layer == 4
        with pytest.raises(AssertionError, match="measured"):
            request("sized").config(measure)


class TestToml:
    def write(self, folder: Path, text: str) -> str:
        path = folder / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path.as_posix()

    def test_recipe_then_file_then_flags(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path,
            'recipe = "small"\ndepth = 6\nminutes = 2\ndata = "a,b"\ncompile = "off"\n'
            "[model]\nseq_len = 128\nbias = true\n[optim.muon]\nlr = 1\n",
        )
        config = resolve(path)
        assert (config.recipe, config.model.n_layer, config.model.n_embd) == ("small", 6, 384)
        assert (config.model.seq_len, config.model.bias, config.optim.muon.lr) == (128, True, 1.0)
        assert config.horizon == Horizon(amount=120.0, unit="seconds")
        assert (config.data.source, config.runtime.compile) == (("a", "b"), "off")
        over = resolve(f"{path} --depth 2 --steps 7 --model.seq-len 64 --data z --model.no-bias")
        assert (over.model.n_layer, over.model.n_embd, over.model.seq_len) == (2, 128, 64)
        assert (over.horizon, over.data.source) == (Horizon(amount=7, unit="steps"), ("z",))
        assert (over.model.bias, over.optim.muon.lr, over.runtime.compile) == (False, 1.0, "off")

    def test_a_home_folder_is_no_folder_of_that_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve(self.write(tmp_path, 'run_dir = "~/runs/a"\n')).run_dir == str(tmp_path / "runs/a")
        assert request("--resume=~/b").resume == str(tmp_path / "b")

    def test_none_turns_off_what_has_a_default(self, tmp_path: Path) -> None:
        """TOML has no word for it."""
        path = self.write(tmp_path, '[checkpoint]\nevery_seconds = "none"\n[data]\nsource = ["none"]\n')
        config = resolve(path)
        assert config.checkpoint.every_seconds is None
        assert config.data.source == ("none",)
        assert resolve("quickstart --checkpoint.every-seconds none").checkpoint.every_seconds is None

    def test_elements_of_a_list_and_names_that_are_there_keep_their_commas(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert resolve(self.write(tmp_path, 'data = ["a,b", "c"]\n')).data.source == ("a,b", "c")
        (tmp_path / "d,e").touch()
        monkeypatch.chdir(tmp_path)
        assert resolve("--data d,e --data f,d,e").data.source == ("d,e", "f", "d", "e")
        for field in ("source", "val_source"):
            given = resolve(f"--data.{field} d,e --data.{field} f,d,e").data
            assert getattr(given, field) == ("d,e", "f", "d", "e")
            path = self.write(tmp_path, f'data.{field} = "f,g"\n')
            assert getattr(resolve(path).data, field) == ("f", "g")

    def test_a_short_flag_beats_the_files_long_field(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, '[model]\nn_layer = 3\n[horizon]\namount = 5\nunit = "steps"\nuntil_val_loss = 2\n')
        assert resolve(path).model.n_layer == 3
        config = resolve(f"{path} --depth 2 --minutes 1")
        assert config.model.n_layer == 2
        assert config.horizon == Horizon(amount=60.0, unit="seconds", until_val_loss=2.0)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("[model]\nn_layers = 3", "model.n_layers = 3: there is no such field (nearest valid: model.n_layer)"),
            ('[model]\nn_layer = "3"', "model.n_layer = '3': must be a whole number"),
            ("[model]\nn-layer = 2\nn_layer = 3", "model.n_layer = 3: is given twice: give it once"),
            ('"model.n_layer" = 2\n[model]\nn_layer = 3', "model.n_layer = 3: is given twice: give it once"),
            ("minutes = -1", "minutes = -1"),
            ("minutes = 1\nsteps = 1", "both say how long"),
            ("steps = 10\n[horizon]\namount = 5", "--steps and --horizon.amount both say how long to train"),
            ('steps = 10\nhorizon = { amount = 5, unit = "tokens" }', "--steps and --horizon.amount both say how long"),
            ('recipe = "smal"', "did you mean small"),
            ('resume = "x"', "resume = 'x'"),
            ("depth = [1]", "depth = [1]: must be a whole number, or none"),
            ("model = 3", "model = 3: is a group of fields"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(UserError) as caught:
            resolve(self.write(tmp_path, text))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


class TestDisagreements:
    """What decides whether --resume runs/NAME may go on beside other arguments."""

    def test_what_the_run_has_may_be_said_again(self) -> None:
        stored = resolve("small --depth 2 --steps 7 --seed 3")
        for argv in ("", "small", "small --depth 2 --steps 7 --seed 3", "--model.n-layer 2 --run-dir elsewhere"):
            assert request(f"--resume x {argv}").disagreements(stored) == []

    @pytest.mark.parametrize(
        ("argv", "line"),
        [
            ("quickstart", "recipe: 'small' vs 'quickstart'"),
            ("--depth 4", "model.n_layer: 2 vs 4"),
            ("--steps 8", "horizon.amount: 7.0 vs 8.0"),
            ("--seed 4", "seed: 1337 vs 4"),
            ("--data x", "data.source: ('stdlib',) vs ('x',)"),
        ],
    )
    def test_anything_else_is_named(self, argv: str, line: str) -> None:
        stored = resolve("small --depth 2 --steps 7")
        assert request(f"--resume x {argv}").disagreements(stored) == [line]


class TestMain:
    def test_user_errors_are_one_line_and_exit_code_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.end_with(monkeypatch, UserError("first\nsecond"))
        assert cli.main(["plan"]) == 2
        assert capsys.readouterr().err == "gptlab: error: first second\n"

    @pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(0), 0), (SystemExit(3), 3)])
    def test_other_ends(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
        self.end_with(monkeypatch, error)
        assert cli.main(["plan"]) == code

    def test_a_bug_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end_with(monkeypatch, ZeroDivisionError("bug"))
        with pytest.raises(ZeroDivisionError):
            cli.main(["plan"])

    @pytest.mark.parametrize(("argv", "says"), [(["trian"], "did you mean train?"), (["zzz"], "there are train, plan"),
                                               (["--vesion"], "did you mean --version?")])  # fmt: skip
    def test_unknown_commands(self, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(argv) == 2
        text = capsys.readouterr().err
        assert says in text
        assert text.count("\n") == 1

    @staticmethod
    def end_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        class Command:
            @staticmethod
            def main(argv: list[str]) -> int:
                raise error

        monkeypatch.setattr("gptlab.cli.main.importlib.import_module", lambda name: Command)


def test_recipe_list_is_one_line_each() -> None:
    assert recipe_list() == "quickstart  The default.\nsmall       A small run."
