"""Arrays as the kernels get them, with garbage where they must not look."""

import numpy as np

from pallas_flash.config import ROW_TILE


def spoiled(x: np.ndarray, lengths: tuple[int, ...] | None) -> np.ndarray:
    """(B, T, N, H) with NaN and Inf behind the lengths, and zeros up to whole groups of rows."""
    x = x.copy()
    for row, length in zip(x, lengths or (), strict=bool(lengths)):
        row[length::2], row[length + 1 :: 2] = np.nan, np.inf
    return np.pad(x, ((0, 0), (0, -x.shape[1] % ROW_TILE), (0, 0), (0, 0)))
