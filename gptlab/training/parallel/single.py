"""One process: it holds everything and makes the whole update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptlab.training.checkpoint.slices import TensorSlice, even_slices
from gptlab.training.checkpoint.weights import load_weights
from gptlab.training.parallel.strategy import Strategy


class Single(Strategy):
    def finish_reduction(self, loss: Tensor) -> Tensor:
        return loss

    def weight_slices(self) -> list[TensorSlice]:
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return even_slices(weights, self.group.rank, self.group.size)

    def moment_slices(self) -> list[TensorSlice]:
        return even_slices(self.optimizer.state_tensors(), self.group.rank, self.group.size)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        load_weights(self.model, tensors)

    def load_moments(self, tensors: Mapping[str, Tensor], json: Mapping[str, Any]) -> None:
        self.optimizer.load_state(tensors, json)
