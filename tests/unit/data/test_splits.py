"""Splits: by content hash and by place, at their edges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptlab.config.errors import UserError
from gptlab.data.corpus.documents import split_documents


class Texts:
    """A corpus that is a list."""

    name = "texts"

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.read = 0

    def texts(self) -> Iterator[str]:
        for text in self._texts:
            self.read += 1
            yield text


def hash_split(texts: list[str], val_fraction: float) -> list[tuple[str, str]]:
    return list(split_documents(Texts(texts), "hash", val_fraction))


def unit_hash(text: str) -> float:
    """BLAKE2b of the text as a number in [0, 1)."""
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 2**64


def test_hash_split_by_hand() -> None:
    texts = [f"document {i}" for i in range(2000)]
    assert hash_split(texts, 0.1) == [("val" if unit_hash(text) < 0.1 else "train", text) for text in texts]
    share = sum(side == "val" for side, _ in hash_split(texts, 0.1)) / 2000
    assert abs(share - 0.1) < 0.02  # three standard deviations of a binomial: 3 * sqrt(0.09 / 2000)


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=12), st.floats(0.01, 0.99), st.randoms())
def test_sides_depend_on_content_alone(texts: list[str], val_fraction: float, random: object) -> None:
    if len(set(texts)) == 1:
        with pytest.raises(UserError, match="tail"):
            hash_split(texts, val_fraction)
        return
    pairs = hash_split(texts, val_fraction)
    assert [text for _, text in pairs] == texts
    sides = {text: side for side, text in pairs}
    assert all(sides[text] == side for side, text in pairs)  # identical documents stand on one side
    assert set(sides.values()) == {"train", "val"}
    shuffled = list(texts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {text: side for side, text in hash_split(shuffled, val_fraction)} == sides


def test_small_corpora_get_both_sides() -> None:
    texts = ["a", "b", "c", "b"]
    by_hash = sorted(set(texts), key=unit_hash)
    assert {text for side, text in hash_split(texts, 1e-9) if side == "val"} == {by_hash[0]}
    assert {text for side, text in hash_split(texts, 1 - 1e-9) if side == "train"} == {by_hash[-1]}


def test_hash_split_streams() -> None:
    corpus = Texts([f"document {i}" for i in range(10_000)])
    next(split_documents(corpus, "hash", 0.05))
    assert corpus.read < 500  # the chance of no validation document among 500 is 0.95**500 = 1e-11


def test_tail_cuts_where_nanogpt_cuts() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1234))
    n = int(len(text) * 0.9)
    assert list(split_documents(Texts([text]), "tail", 0.1)) == [("train", text[:n]), ("val", text[n:])]


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=9), st.floats(0.01, 0.99))
def test_tail_of_several_documents_is_the_tail_of_all(texts: list[str], val_fraction: float) -> None:
    whole = "".join(texts)
    n = int(len(whole) * (1 - val_fraction))
    if n == 0 or n == len(whole):
        with pytest.raises(UserError, match="empty"):
            list(split_documents(Texts(texts), "tail", val_fraction))
        return
    pairs = list(split_documents(Texts(texts), "tail", val_fraction))
    assert all(text for _, text in pairs)
    assert "".join(text for side, text in pairs if side == "train") == whole[:n]
    assert "".join(text for side, text in pairs if side == "val") == whole[n:]
    assert [side for side, _ in pairs] == sorted(side for side, _ in pairs)
