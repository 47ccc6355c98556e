"""Orders, accumulated while the layers go by.

Axis names: B batch, T tokens (rows are queries, columns are keys), M maps.
A layer's head-mean attention comes in, running means stay; nothing here keeps a list of layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from storage_schema.recipe import MapName


class MapAccumulator:
    """The maps of one batch, updated layer by layer from the first to the last.

    With `n` layers seen, `E_k` the mean over all choices of k of them of their product (later layers on the left), and
    `A_n` the newest layer:

        E_k <- (n-k)/n * E_k + k/n * A_n E_{k-1},   E_0 = I,   k from high to low

    After the last layer `E_k` is the paper's `O_k` (arXiv 2511.05064). Each `E_k` keeps rows that sum to 1, so nothing
    overflows at any depth; a layer costs one product for each order above the first. Rollout (Abnar & Zuidema
    2020), `R <- (A_n + I) R`, is kept as `R / 2^n` for the same reason and costs one product more.

    Numerics: float32 throughout, whatever the attention's dtype.
    """

    def __init__(self, maps: tuple[MapName, ...]) -> None:
        self.maps = maps
        self.num_layers = 0
        self._means: list[Tensor] = []
        self._highest = max((name for name in maps if isinstance(name, int)), default=0)
        self._rollout: Tensor | None = None

    def add_layer(self, attention: Float[Tensor, "B T T"]) -> None:
        """Takes in the next layer's head-mean attention."""
        attention = attention.float()
        self.num_layers += 1
        n = self.num_layers
        if len(self._means) < self._highest:
            self._means.append(torch.zeros_like(attention))
        for k in range(len(self._means), 1, -1):
            self._means[k - 1].baddbmm_(attention, self._means[k - 2], beta=(n - k) / n, alpha=k / n)
        if self._means:
            self._means[0].lerp_(attention, 1 / n)
        if "rollout" in self.maps:
            if self._rollout is None:
                self._rollout = torch.eye(attention.shape[-1], device=attention.device).repeat(len(attention), 1, 1)
            self._rollout = torch.baddbmm(self._rollout, attention, self._rollout, beta=0.5, alpha=0.5)

    def stack_maps(self) -> Float[Tensor, "B M T T"]:
        """The maps of `self.maps`, in its order, float32. Rows sum to 1.

        Raises:
            ValueError: fewer layers were added than the highest order multiplies.
        """
        if self.num_layers < self._highest:
            raise ValueError(f"order {self._highest} of {self.num_layers} layers does not exist")
        named: dict[MapName, Tensor] = {k + 1: mean for k, mean in enumerate(self._means)}
        if self._rollout is not None:
            named["rollout"] = self._rollout
        return torch.stack([named[name] for name in self.maps], dim=1)
