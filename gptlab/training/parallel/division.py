"""Which rank updates what: whole matrices for Muon, runs of elements for AdamW. Computed alike on every rank.

Every matrix has one owner, which keeps its moments and orthogonalizes it. Matrices of one shape are dealt out in rounds
of one per rank, so that all ranks multiply and send equally much. What is left over of all shapes goes, the most
expensive first, to the rank with the least work. What AdamW updates is cut by elements.

Gradients travel in buckets in the order in which a backward pass completes them: as the model's order suggests, or as a
warm-up has measured. Who owns what does not depend on it. New weights travel in buckets of what is updated together. A
bucket has one chunk for each rank: the slices that this rank owns, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from gptlab.runtime.hardware.device import Platform
from gptlab.training.checkpoint.format import TensorSlice, even_slices

T = TypeVar("T")

# Small buckets pay their latency often; large ones begin late, and the last one, which nothing hides, is long.
# torch's DistributedDataParallel takes 25 MiB too (Li et al., VLDB 2020, found 10 to 25 MB best on 16 and 32 GPUs).
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Wire:
    """How gradients and new weights travel."""

    bucket_bytes: int = BUCKET_BYTES
    """Of gradients."""
    measured_order: bool = False
    """Whether buckets leave in the order in which the warm-up's backward pass completed the gradients, instead of that
    of the model from its last parameter to its first. Sums over more than two ranks may then have other bits."""
    bfloat16_tables: bool = False
    """Whether tables of which the model reads only the bfloat16 rounding travel in it. Their owners keep float32, and
    save it, so that no bit of a run changes."""


# Fast links (NVLink, InfiniBand) need larger buckets to be busy: Megatron-LM takes 40 million elements or more. Less
# here, since nothing hides the last bucket; not measured yet.
WIRES: Mapping[Platform, Wire] = {"cuda": Wire(64 * 2**20, measured_order=True, bfloat16_tables=True)}
"""By the platform that a model is planned for; `Wire()` for the others."""

Dealt = Sequence[Sequence[TensorSlice]]
"""The slices of each rank."""


@dataclass(frozen=True, slots=True)
class Bucket:
    slices: tuple[tuple[TensorSlice, ...], ...]
    """What each rank owns of it."""
    chunk: int
    """Elements for each rank; a shorter share is padded with zeros."""
    names: frozenset[str]
    """Of the parameters that have a part in it."""

    @classmethod
    def of(cls, dealt: Dealt) -> Bucket:
        return cls(
            tuple(tuple(slices) for slices in dealt),
            max(sum(one.count for one in slices) for slices in dealt),
            frozenset(one.name for slices in dealt for one in slices),
        )


@dataclass(frozen=True, slots=True)
class Division:
    gradients: tuple[Bucket, ...]
    """In the order in which a backward pass completes them."""
    stacks: Mapping[tuple[int, int], Bucket]
    """New weights of Muon's matrices, by shape."""
    rest: tuple[Bucket, ...]
    """New weights of AdamW."""

    def share(self, rank: int) -> list[TensorSlice]:
        """What `rank` updates."""
        return [one for bucket in self.gradients for one in bucket.slices[rank]]


def divide(
    parameters: Mapping[str, Tensor],
    matrices: Sequence[TensorSlice],
    adamw_groups: Iterable[Sequence[str]],
    n_ranks: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    order: Sequence[str] | None = None,
) -> Division:
    """Divide all parameters among `n_ranks`.

    Args:
        parameters: weights by name, in the model's order, all of one type.
        matrices: all that Muon updates, each as a slice of shape (rows, cols).
        adamw_groups: names of parameters with the same settings.
        bucket_bytes: size of a bucket of gradients; one round of matrices may be larger.
        order: of the parameters, as a backward pass completes their gradients. None: from the last to the first.
    """
    place = {name: number for number, name in enumerate(parameters)}
    most = bucket_bytes // next(iter(parameters.values())).element_size()
    rounds = _deal(sorted(matrices, key=lambda m: (place[m.name], m.start), reverse=True), n_ranks)
    runs = [
        Bucket.of([even_slices({name: parameters[name] for name in names}, rank, n_ranks) for rank in range(n_ranks)])
        for group in adamw_groups
        for names in consecutive(
            sorted(group, key=place.__getitem__, reverse=True), lambda n: parameters[n].numel(), most
        )
    ]
    stacks: dict[tuple[int, int], list[list[TensorSlice]]] = {_shape(m): [[] for _ in range(n_ranks)] for m in matrices}
    for dealt in rounds:
        for rank, owned in enumerate(dealt):
            for matrix in owned:
                stacks[_shape(matrix)][rank].append(matrix)
    units = [*(Bucket.of(dealt) for dealt in rounds), *runs]
    # A bucket is complete with the last of its gradients.
    turn = {name: number for number, name in enumerate(order or reversed(place))}
    units.sort(key=lambda unit: max(turn[name] for name in unit.names))
    packed = consecutive(units, lambda unit: unit.chunk * n_ranks, most)
    return Division(
        tuple(_joined(buckets, n_ranks) for buckets in packed),
        {shape: Bucket.of(dealt) for shape, dealt in stacks.items()},
        tuple(runs),
    )


def _shape(matrix: TensorSlice) -> tuple[int, int]:
    return matrix.tensor.size(0), matrix.tensor.size(1)


def multiplications(rows: int, cols: int) -> int:
    """Of an orthogonalization, up to a factor: the Gram matrix is that of the short side."""
    return rows * cols * min(rows, cols)


def _deal(matrices: Sequence[TensorSlice], n_ranks: int) -> list[list[list[TensorSlice]]]:
    """Rounds: the matrices that each rank gets."""
    alike: dict[tuple[int, int], list[TensorSlice]] = {}
    for matrix in matrices:
        alike.setdefault(_shape(matrix), []).append(matrix)
    rounds: list[list[list[TensorSlice]]] = []
    left: list[TensorSlice] = []
    for group in alike.values():
        full = len(group) - len(group) % n_ranks
        rounds += [[[matrix] for matrix in group[n : n + n_ranks]] for n in range(0, full, n_ranks)]
        left += group[full:]
    if left:
        busy = [0] * n_ranks
        last: list[list[TensorSlice]] = [[] for _ in busy]
        for matrix in sorted(left, key=lambda matrix: -multiplications(*_shape(matrix))):
            owner = busy.index(min(busy))
            last[owner].append(matrix)
            busy[owner] += multiplications(*_shape(matrix))
        rounds.append(last)
    return rounds


def consecutive(items: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Consecutive items together, up to a sum of their sizes of `most`, or one item."""
    groups: list[list[T]] = []
    total = 0
    for item in items:
        if not groups or total + size(item) > most:
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += size(item)
    return groups


def _joined(buckets: Sequence[Bucket], n_ranks: int) -> Bucket:
    return Bucket.of([[one for bucket in buckets for one in bucket.slices[rank]] for rank in range(n_ranks)])
