"""Untrusted models, as transformers and nanoGPT keep them: refused in one line, at once; nothing in them runs."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

import psutil
import pytest
import torch
from forked import run_forked
from hostile_files import ANY_FILE, ANY_JSON, pipe, posix_only, refuse
from safetensors.torch import save_file

from gptlab.config.errors import UserError
from gptlab.model.interop.hf_config import model_config_of, read_hf_config
from gptlab.model.interop.hf_weights import read_hf_tensors, read_hf_weights, read_nanogpt
from gptlab.model.interop.torch_file import read_torch_file

pytestmark = [posix_only, pytest.mark.timeout(60)]

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 12, "vocab_size": 50}
NANOCHAT = {
    "model_type": "nanochat", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "max_position_embeddings": 12, "vocab_size": 64, "intermediate_size": 32,
}  # fmt: skip


# --- files of torch.save ----------------------------------------------------------------------------------------------


def archive(
    program: bytes, more: dict[str, bytes] | None = None, *, packed: bool = False, twice: bool = False
) -> bytes:
    """A file of torch.save with this data.pkl."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        entries = {"data.pkl": program, "byteorder": b"little", "version": b"3\n", **(more or {})}
        for name, content in entries.items():
            file.writestr(f"archive/{name}", content)
        if twice:
            file.writestr("archive/data.pkl", program)
    return buffer.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(kind: str, elements: int) -> bytes:
    """A reference to a storage, with an int of 8 bytes for its length."""
    named = b"c" + kind.replace(" ", "\n").encode() + b"\n"
    number = b"\x8a\x08" + struct.pack("<q", elements)
    return b"(" + text("storage") + named + text("0") + text("cpu") + number + b"tQ"


def looks_like(shape: tuple[int, ...], elements: int = 1) -> bytes:
    """A tensor of this shape, all of whose numbers are the first of its storage."""

    def integers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values) + b"t"

    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage("torch FloatStorage", elements) + b"K\x00" + integers(shape)
        + integers((0,) * len(shape)) + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


def doubled(times: int) -> bytes:
    """t = (t, t), again and again, by the memo."""
    return b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(times))


P = b"\x80\x02"
MARK = "it-ran"
"""The file that a program would make in the current folder if it ran."""
PROGRAMS: dict[str, tuple[bytes, str]] = {
    "os.system": (P + b"cposix\nsystem\n" + text(f"touch {MARK}") + b"\x85R.", "posix.system"),
    "eval": (P + b"cbuiltins\neval\n" + text(f"open('{MARK}', 'w')") + b"\x85R.", "builtins.eval"),
    "getattr": (P + b"cbuiltins\ngetattr\n.", "builtins.getattr"),
    "torch.load": (P + b"ctorch.serialization\nload\n" + text(MARK) + b"\x85R.", "torch.serialization.load"),
    "INST": (P + b"(" + text(f"touch {MARK}") + b"iposix\nsystem\n.", "opcode INST"),
    "STACK_GLOBAL": (P + text("posix") + text("system") + b"\x93.", "opcode STACK_GLOBAL"),
    "NEWOBJ": (P + b"ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
    "bytearray of 2^50": (P + b"cbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", 1 << 50) + b"\x85R.", "bytearray"),
    "a storage that is called": (
        P + b"ctorch\nFloatStorage\n\x8a\x08" + struct.pack("<q", 1 << 50) + b"\x85R.", "asks for torch.FloatStorage",
    ),
    "a number that is called": (P + b"K\x01)R.", "a call of a value"),
    "a storage of 2^50": (P + storage("torch FloatStorage", 1 << 50) + b".", "a storage of 1125899906842624 elements"),
    "a storage of less than nothing": (P + storage("torch FloatStorage", -1) + b".", "a storage of -1 elements"),
    "a storage of another type": (P + storage("collections OrderedDict", 1) + b".", "a storage of 1"),
    "no storage": (P + text("x") + b"Q.", "no storage"),
    "tuples of 2^60 parts as a key": (P + b"}" + doubled(60) + b"Ns.", "a tuple of more than"),
    "a tuple of itself, deep": (P + b")" + b"\x85" * 200_000 + b".", "a tuple of more than"),
    "integers that collide": (P + b"\x8a\x64" + b"\x7f" * 100 + b".", "an integer of 799 bits"),
    "a million opcodes": (P + b"N" * 1_000_000 + b".", "more than 400,000 opcodes"),
    "17 MB": (P + text("x" * (17 << 20)) + b".", "too many for its data.pkl"),
    "text of 4 GB": (P + b"X\xff\xff\xff\xffx.", "damaged"),
    "an empty stack": (P + b"RRR.", "damaged"),
    "no such memo": (P + b"h\x07.", "damaged"),
    "cut short": (P + b"}", "damaged"),
    "nothing": (b"", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_in_a_file_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    program, says = PROGRAMS[kind]
    path = tmp_path / "ckpt.pt"
    for old in (False, True):
        path.write_bytes(OLD + program if old else archive(program))
        # In an old file, which is no archive, the program is as long as the file.
        said = refuse(
            lambda: read_torch_file(path), "" if old and kind == "17 MB" else says, trace=len(program) < 100_000
        )
        assert str(path) in said
        assert "nothing in it was run" in said
        assert not Path(MARK).exists()


OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03." + b"\x80\x02}."
"""What a file from before torch 1.6 begins with: magic number, version 1001, system."""


def test_the_trap_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused above does run where nobody looks."""
    monkeypatch.chdir(tmp_path)
    for kind in ("os.system", "eval"):
        pickle.loads(PROGRAMS[kind][0])
        assert Path(MARK).exists()
        Path(MARK).unlink()


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "packed": (lambda: archive(P + b"}.", packed=True), "compressed"),
    "a bomb": (lambda: archive(P + b"}.", {"data/0": bytes(100_000_000)}, packed=True), "compressed"),
    "two data.pkl": (lambda: archive(P + b"}.", twice=True), "overlap"),
    "no data.pkl": (lambda: archive(P + b"}.").replace(b"data.pkl", b"date.pkl"), "no data.pkl"),
    "no archive at all": (lambda: b"PK\x05\x06" + bytes(18), "no data.pkl"),
    "text": (lambda: b"weights, honestly" * 100, "not a file of torch.save"),
    "a tar archive": (lambda: bytes(257) + b"ustar  \0" + bytes(2000), "not a file of torch.save"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives(tmp_path: Path, kind: str) -> None:
    make, says = ARCHIVES[kind]
    (tmp_path / "ckpt.pt").write_bytes(make())
    refuse(lambda: read_torch_file(tmp_path / "ckpt.pt"), says)


def test_entries_that_share_their_bytes(tmp_path: Path) -> None:
    """1,000 names for the same megabyte: 1 GB out of one."""
    names = {f"data/{i}": b"x" for i in range(1000)}
    content = archive(P + b"}.", names | {"data/big": bytes(1 << 20)})
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        big = next(entry for entry in file.infolist() if entry.filename.endswith("big"))
        sizes = struct.pack("<III", big.CRC, big.file_size, big.file_size)
        small = next(entry for entry in file.infolist() if entry.filename.endswith("data/0"))
    content = content.replace(struct.pack("<III", small.CRC, 1, 1), sizes)
    (tmp_path / "ckpt.pt").write_bytes(content)
    refuse(lambda: read_torch_file(tmp_path / "ckpt.pt"), "overlap")


@pytest.mark.parametrize("harm", ANY_FILE, ids=lambda f: f.__name__)
def test_torch_files_that_are_none(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    harm(tmp_path / "ckpt.pt")
    refuse(lambda: read_torch_file(tmp_path / "ckpt.pt"), str(tmp_path / "ckpt.pt"))


def test_plain_files_still_come_in_both_forms(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    betas = (0.9, 0.95)
    state = {
        "model": {"a": shared, "b": shared.view(2, 3).T, "half": torch.ones(2, dtype=torch.bfloat16)},
        "p": torch.nn.Parameter(torch.ones(2)), "groups": [{"betas": betas}, {"betas": betas}], "size": torch.Size([2]),
        "dtype": torch.float16, "n": 2**40, "none": None, "yes": True, "text": "ü", "best": torch.tensor(1.5),
    }  # fmt: skip
    for zipped in (True, False):
        torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        back = read_torch_file(tmp_path / "x.pt")
        assert repr(back) == repr(state)


def nanogpt(path: Path, **changes: Any) -> Path:
    arguments = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 10, "bias": False}
    content = {"model_args": arguments, "model": {"transformer.wte.weight": torch.ones(10, 8)}, "config": {}}
    for name, value in changes.items():
        target = content if name in content else arguments
        target[name] = value
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_layer": 10**9}, "is more than any model has"),
        ({"n_layer": 9_000}, "too few for the configuration's 9,000 layers"),
        ({"n_embd": 2**19, "n_head": 2**17}, "shape"),
        ({"vocab_size": 2**31 - 1}, "shape"),
        ({"block_size": 2**62}, "is more than any model has"),
        ({"n_layer": torch.ones(3)}, "n_layer = Tensor"),
        ({"n_layer": [0] * 1_000}, "n_layer = list"),
        ({"bias": torch.ones(3)}, "bias = Tensor"),
        ({"model": {"x": 1}}, "no table of tensors"),
        ({"model": {"x": torch.ones(3).to_sparse()}}, ""),
    ],
)
def test_absurd_nanogpt_checkpoints(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = nanogpt(tmp_path / "ckpt.pt", **changes)

    def read() -> object:
        checkpoint = read_nanogpt(path)
        return checkpoint.weights(checkpoint.model)

    refuse(read, says or str(path))


def test_a_number_that_looks_like_a_table(tmp_path: Path) -> None:
    """One float under a shape of 2^60, with strides of zero: nothing is computed over it."""
    program = (
        P + b"}(" + text("model_args") + b"}(" + b"".join(
            text(name) + b"K" + bytes([size]) for name, size in
            (("n_layer", 1), ("n_head", 2), ("n_embd", 8), ("block_size", 8), ("vocab_size", 10))
        ) + b"u" + text("model") + b"}" + text("transformer.wte.weight") + looks_like((2**30, 2**30)) + b"su."
    )  # fmt: skip
    path = tmp_path / "ckpt.pt"
    path.write_bytes(archive(program, {"data/0": bytes(4)}))
    refuse(lambda: read_nanogpt(path), "has the shape (1073741824, 1073741824), and 4 bytes of data")


# --- folders of transformers ------------------------------------------------------------------------------------------


def folder(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def imported(path: Path) -> object:
    return read_hf_weights(path, model_config_of(read_hf_config(path)))


@pytest.mark.parametrize("harm", ANY_JSON, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_hostile_json_beside_weights(tmp_path: Path, harm: Callable[[Path], None], name: str) -> None:
    folder(tmp_path, GPT2)
    harm(tmp_path / name)
    refuse(lambda: imported(tmp_path), "" if harm in ANY_FILE and "index" in name else name)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPT2 | {"n_layer": 10**9}, "is more than any model has"),
        (GPT2 | {"n_layer": 10_000}, "too few for the configuration's 10,000 layers"),
        (GPT2 | {"n_embd": 10**40, "n_head": 1}, "positive whole number"),
        (GPT2 | {"n_embd": 2**20, "n_head": 1}, "the weights lack"),
        (GPT2 | {"n_inner": 2**62}, "is more than any model has"),
        (GPT2 | {"vocab_size": 2**40}, "is more than any model has"),
        (GPT2 | {"model_type": ["gpt2"]}, "names no model_type"),
        (GPT2 | {"model_type": None}, "names no model_type"),
        (GPT2 | {"activation_function": "x" * 1_000_000}, "activation_function"),
        (GPT2 | {"gptlab": {"n_layer": [[]], "x": {}}}, "the weights"),
        (NANOCHAT | {"num_attention_heads": 0}, "positive whole number"),
        (NANOCHAT | {"hidden_size": 0}, ""),
        (NANOCHAT | {"hidden_size": "x"}, "positive whole number"),
        (NANOCHAT | {"hidden_size": [8]}, "positive whole number"),
        (NANOCHAT | {"rope_parameters": [1]}, "describes no NanoChat"),
        (NANOCHAT | {"hidden_act": {}}, "hidden_act"),
        (NANOCHAT | {"num_hidden_layers": 1e300}, ""),
        (NANOCHAT | {"num_key_value_heads": "2"}, "positive whole number"),
        (NANOCHAT | {"rms_norm_eps": []}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_absurd_configurations(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    folder(tmp_path, config, {"x": torch.ones(1), "y": torch.ones(1)})
    refuse(lambda: imported(tmp_path), says)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"w": "../model.safetensors"}, "outside"),
        ({"w": "/etc/passwd"}, "outside"),
        ({"w": "a\\b"}, "outside"),
        ({"w": ".."}, "cannot read"),
        ({"w": {"deep": [[[]]]}}, "names no files"),
        ({"w": "config.json"}, "no complete safetensors file"),
        ({"w": "pipe"}, "not a regular file"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, places: object, says: str) -> None:
    folder(tmp_path, GPT2)
    pipe(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refuse(lambda: read_hf_tensors(tmp_path), says)


HEADERS = {
    "of 2^60 bytes": (1 << 60).to_bytes(8, "little") + bytes(100),
    "of 90 MB": (90_000_000).to_bytes(8, "little") + b"{",
    "deep": (1_000_000).to_bytes(8, "little") + b"[" * 1_000_000,
    "overlapping": json.dumps({
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }).encode(),
    "an absurd shape": json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}).encode(),
    "beyond the end": json.dumps({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_safetensors(tmp_path: Path, kind: str) -> None:
    text = HEADERS[kind]
    content = len(text).to_bytes(8, "little") + text + bytes(12) if text.startswith(b"{") else text
    folder(tmp_path, GPT2)
    (tmp_path / "model.safetensors").write_bytes(content)
    refuse(lambda: read_hf_tensors(tmp_path), "no complete safetensors file")


def test_tensors_that_do_not_go_together(tmp_path: Path) -> None:
    """Of NanoChat the three parts of one matrix: other shapes, none at all, types without an infinity."""
    prefix = "model.layers.0.self_attn."
    parts = {f"{prefix}{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"}
    rest = {
        "model.embed_tokens.weight": torch.ones(64, 8), "lm_head.weight": torch.ones(64, 8),
        "model.layers.0.mlp.fc1.weight": torch.ones(32, 8), "model.layers.0.mlp.fc2.weight": torch.ones(8, 32),
    }  # fmt: skip
    imported(folder(tmp_path / "whole", NANOCHAT, parts | rest))
    for number, (wrong, says) in enumerate([
        (torch.ones(8, 7), "do not go together"), (torch.ones(()), "do not go together"),
        (torch.ones(8, 8).half(), "do not go together"), (torch.ones(7, 8), "has the shape"),
    ]):  # fmt: skip
        path = folder(tmp_path / f"{number}", NANOCHAT, parts | rest | {f"{prefix}k_proj.weight": wrong})
        refuse(lambda path=path: imported(path), says)
    path = folder(
        tmp_path / "small", NANOCHAT, parts | rest | {"lm_head.weight": torch.ones(64, 8).to(torch.float8_e5m2)}
    )
    refuse(lambda: imported(path), "is of torch.float8_e5m2")


def refuse_within(free_bytes: int, paths: list[Path]) -> None:
    """Read the files with so many bytes of address space left, and print the refusals."""
    limit = psutil.Process().memory_info().vms + free_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in paths:
        try:
            (read_hf_tensors if path.is_dir() else read_torch_file)(path)
        except UserError as error:
            print(error)


def test_no_library_beneath_takes_the_memory_either(tmp_path: Path) -> None:
    """With 256 MB of address space left, what tracing does not see (torch, Rust) would end in another error."""
    paths = []
    for kind in ("bytearray of 2^50", "a storage that is called", "a storage of 2^50", "tuples of 2^60 parts as a key"):
        paths.append(tmp_path / f"{len(paths)}.pt")
        paths[-1].write_bytes(archive(PROGRAMS[kind][0]))
    for kind in ("of 2^60 bytes", "an absurd shape", "beyond the end"):
        paths.append(folder(tmp_path / kind, GPT2))
        text = HEADERS[kind]
        (paths[-1] / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + bytes(12) if text.startswith(b"{") else text
        )
    done = run_forked(lambda: refuse_within(2**28, paths))
    assert (done.returncode, done.stderr) == (0, "")
    assert all(str(path) in line for path, line in zip(paths, done.stdout.splitlines(), strict=True))
