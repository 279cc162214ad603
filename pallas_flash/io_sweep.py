"""The IO model over lengths: how traffic grows, and from which length on something holds."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from pallas_flash import hardware, io_counts, io_model
from pallas_flash.io_model import Estimate
from pallas_flash.problem import Operands, Problem

SPEEDS = hardware.H200
LONGEST = 2**20


@dataclasses.dataclass(frozen=True)
class Study:
    """What is asked: a problem, M, and which directions."""

    problem: Problem
    operands: Operands
    sram_bytes: int
    backward: bool

    @property
    def directions(self) -> tuple[bool, ...]:
        return (False, True) if self.backward else (False,)

    def estimates(self, backward: bool) -> tuple[Estimate, ...]:
        return io_model.estimates(
            self.problem,
            self.operands,
            sram_bytes=self.sram_bytes,
            backward=backward,
            speeds=SPEEDS,
        )

    def at(self, q_len: int) -> "Study":
        """The same with another T; S changes in proportion."""
        kv_len = max(1, self.problem.kv_len * q_len // self.problem.q_len)
        problem = dataclasses.replace(self.problem, q_len=q_len, kv_len=kv_len)
        return dataclasses.replace(self, problem=problem)

    def first_length(self, holds: Callable[["Study"], bool]) -> int | None:
        """The least T, a multiple of 64, that `holds`, which changes once; None up to LONGEST."""
        multiple = 1
        while not holds(self.at(64 * multiple)):
            multiple *= 2
            if multiple > LONGEST // 64:
                return None
        lo, hi = multiple // 2, multiple
        while hi - lo > 1:
            middle = (lo + hi) // 2
            lo, hi = (lo, middle) if holds(self.at(64 * middle)) else (middle, hi)
        return 64 * hi


def _is_compute_bound(study: Study) -> bool:
    flops = io_model.visible_flops(study.problem, study.operands)
    least = io_counts.compulsory(study.problem)
    return flops / SPEEDS.matmul_flops_s >= least / SPEEDS.hbm_bytes_s


def _naive_leaves_l2(study: Study) -> bool:
    return study.estimates(False)[1].residency.regime != io_model.RESIDENT


def _tiled_is_below(study: Study) -> bool:
    found = [study.estimates(backward) for backward in study.directions]
    naive, tiled = (sum(e[i].floor_s(SPEEDS) for e in found) for i in (1, -1))
    return tiled < naive


def crossovers(study: Study) -> dict[str, int | None]:
    """Lengths from which on something holds; the last for all directions that are asked for."""
    return {
        "compute_bound_from": study.first_length(_is_compute_bound),
        "scores_leave_l2_from": study.first_length(_naive_leaves_l2),
        "tiled_floor_below_naive_from": study.first_length(_tiled_is_below),
    }


def sweep(study: Study, lengths: Iterable[int], backward: bool) -> list[dict[str, Any]]:
    """Bytes moved by algorithm for every length, and the exponent since the length before."""
    rows: list[dict[str, Any]] = []
    for length in lengths:
        found = study.at(length).estimates(backward)
        row: dict[str, Any] = {"seq_len": length}
        row["bytes"] = {e.algorithm: e.counts.moved for e in found}
        if rows:
            before = rows[-1]
            growth = math.log(length / before["seq_len"])
            row["exponent"] = {
                name: math.log(size / before["bytes"][name]) / growth
                for name, size in row["bytes"].items()
            }
        rows.append(row)
    return rows
