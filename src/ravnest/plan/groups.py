"""Rows of machines side by side, and those that are idle: the state of a search for clusters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .quick import Quick, Row

__all__ = ["Groups"]


class Groups:
    """Every machine of `usable` is in one row, or idle. `per_s` is what all rows do together."""

    def __init__(self, quick: Quick, usable: Iterable[int], rows: Iterable[Row] = ()) -> None:
        self.quick = quick
        self.rows: list[Row] = []
        self.rates: list[float] = []
        self.row_of: dict[int, int] = dict.fromkeys(usable, -1)
        self.usable = list(self.row_of)
        for row in rows:
            self._add(row)

    @property
    def per_s(self) -> float:
        return sum(self.rates)

    @property
    def idle(self) -> list[int]:
        return [m for m in self.usable if self.row_of[m] < 0]

    def replace(self, old: Sequence[int], new: Iterable[Row]) -> None:
        """Rows by number give way to others; who is in none of them is idle."""
        for number in sorted(old, reverse=True):
            self._remove(number)
        for row in new:
            self._add(row)

    def withdraw(self, machines: Iterable[int]) -> None:
        """These idle machines are no longer to be used."""
        for m in machines:
            assert self.row_of[m] < 0
            del self.row_of[m]
        self.usable = list(self.row_of)

    def take_back(self, machines: Iterable[int]) -> None:
        """These machines are to be used again; they are idle at first."""
        self.row_of.update(dict.fromkeys(machines, -1))
        self.usable = list(self.row_of)

    def _add(self, row: Row) -> None:
        for m in row:
            self.row_of[m] = len(self.rows)
        self.rows.append(row)
        self.rates.append(self.quick.per_s(row))

    def _remove(self, number: int) -> None:
        """The last row takes the number of the one that goes."""
        for m in self.rows[number]:
            self.row_of[m] = -1
        row, rate = self.rows.pop(), self.rates.pop()
        if number < len(self.rows):
            self.rows[number], self.rates[number] = row, rate
            for m in row:
                self.row_of[m] = number
