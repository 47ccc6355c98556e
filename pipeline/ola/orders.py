"""Maps, accumulated while the layers go by.

Axis names: B batch, T tokens (rows are queries, columns are keys), M maps.
A layer's head-mean attention comes in, running means stay; nothing here keeps a list of layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from storage_schema.arrays import Packing
from storage_schema.recipe import MapName

BLOCK = 128
"""Rows and columns multiplied at once, at least, where maps are lower triangles: blocks that are zero are left out."""
MOST_BLOCKS = 16
"""Blocks a side; with so many a product costs a fifth of a full one, and a triangle alone would cost a sixth."""


class MapAccumulator:
    """The maps of one batch, updated layer by layer from the first to the last.

    With `n` layers seen, `E_k` the mean over all choices of k of them of their product (later layers on the left), and
    `A_n` the newest layer:

        E_k <- (n-k)/n * E_k + k/n * A_n E_{k-1},   E_0 = I,   k from high to low

    After the last layer `E_k` is the paper's `O_k` (arXiv 2511.05064). Each `E_k` keeps rows that sum to 1, so nothing
    overflows at any depth; a layer costs one product for each order above the first. Rollout (Abnar & Zuidema
    2020), `R <- (A_n + I) R`, is kept as `R / 2^n` for the same reason and costs one product more. A baseline whose
    layers are row-stochastic contributions `C_n` (IRNL, ALTI) is `R <- C_n R`.

    Numerics: float32 throughout, whatever the attention's dtype.
    """

    def __init__(self, maps: tuple[MapName, ...], packing: Packing = "full") -> None:
        self.maps = maps
        self.num_layers = 0
        highest = max((name for name in maps if isinstance(name, int)), default=0)
        self._names: tuple[MapName, ...] = (*range(1, highest + 1), *(name for name in maps if isinstance(name, str)))
        self._is_lower = packing == "lower"
        self._stack: Tensor | None = None

    def add_layer(self, attention: Float[Tensor, "B T T"]) -> None:
        """Takes in the next layer's head-mean attention."""
        attention = attention.float()
        self.num_layers += 1
        n = self.num_layers
        for k in range(min(n, self._highest), 1, -1):
            self._blend(self._map(k, attention), attention, self._map(k - 1, attention), k / n)
        if self._highest:
            self._map(1, attention).lerp_(attention, 1 / n)
        if "rollout" in self._names:
            rollout = self._map("rollout", attention)
            self._blend(rollout, attention, rollout.clone(), 0.5)

    def add_contributions(self, name: str, contributions: Float[Tensor, "B T T"]) -> None:
        """Takes in the next layer's contributions for a baseline; rows sum to 1."""
        product = self._map(name, contributions)
        self._blend(product, contributions, product.clone(), 1.0)

    @property
    def _highest(self) -> int:
        return sum(isinstance(name, int) for name in self._names)

    def _map(self, name: MapName, like: Float[Tensor, "B T T"]) -> Float[Tensor, "B T T"]:
        if self._stack is None:
            batch, num_tokens, _ = like.shape
            self._stack = torch.zeros(batch, len(self._names), num_tokens, num_tokens, device=like.device)
            self._stack[:, self._highest :].diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return self._stack[:, self._names.index(name)]

    def _blend(
        self,
        mean: Float[Tensor, "B T T"],
        left: Float[Tensor, "B T T"],
        right: Float[Tensor, "B T T"],
        weight: float,
    ) -> None:
        """`mean <- (1 - weight) * mean + weight * left @ right`, in place."""
        if not self._is_lower:
            mean.baddbmm_(left, right, beta=1 - weight, alpha=weight)
            return
        num_tokens = mean.shape[-1]
        step = max(BLOCK, num_tokens // MOST_BLOCKS)
        for row in range(0, num_tokens, step):
            rows = slice(row, min(row + step, num_tokens))
            for column in range(0, rows.stop, step):
                # `right` is zero above row `column` there, and `left` is zero after the last of `rows`.
                columns, between = slice(column, min(column + step, rows.stop)), slice(column, rows.stop)
                mean[:, rows, columns].baddbmm_(
                    left[:, rows, between], right[:, between, columns], beta=1 - weight, alpha=weight
                )

    def stack_maps(self) -> Float[Tensor, "B M T T"]:
        """The maps of `self.maps`, in its order, float32. Rows sum to 1.

        Raises:
            ValueError: fewer layers were added than the highest order multiplies.
        """
        if self._stack is None or self.num_layers < self._highest:
            raise ValueError(f"order {self._highest} of {self.num_layers} layers does not exist")
        if self.maps == self._names:
            return self._stack
        return self._stack[:, [self._names.index(name) for name in self.maps]]
