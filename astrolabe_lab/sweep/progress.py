"""How far a sweep is: a bar where somebody watches, a line every few seconds where not."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable

from astrolabe_lab.record import headless

EVERY_S = 10.0  # between two lines


class Progress:
    """Tells of `total` runs, `reused` of which were there before.

    `wanted`: None chooses a bar or lines, False is silence, a function is called with (done, total, row). What is
    left to do is estimated from the runs of the same policy: one can take a hundred times as long as another.
    """

    def __init__(
        self, wanted: bool | Callable[[int, int, dict], None] | None, labels: list[str], total: int, workers: int
    ) -> None:
        watched = not headless() and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.tell = wanted if callable(wanted) else None
        self.lines = wanted is not False and self.tell is None and not watched
        self.done, self.total, self.workers = total - len(labels), total, workers
        self.reused = self.done
        self.left: dict[str, int] = defaultdict(int)
        for label in labels:
            self.left[label] += 1
        self.took: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))  # runs, s of computing
        self.began = self.said = time.monotonic()
        self.first: tuple[float, float] | None = None  # when the first run had ended, and its s of computing
        self.bar = None
        if wanted is not False and self.tell is None and watched:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=total, initial=self.reused, unit="run", desc="sweep")
        if self.reused and self.lines:
            print(f"sweep: {self.reused} of {total} runs were made before", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def finished(self, row: dict) -> None:
        """A run has ended, with this row."""
        self._count(row["policy"])
        if self.first is None:
            self.first = time.monotonic(), row["wall_s"]
        runs, spent_s = self.took[row["policy"]]
        self.took[row["policy"]] = runs + 1, spent_s + row["wall_s"]
        if self.tell:
            self.tell(self.done, self.total, row)
        self._show()

    def failed(self, name: str, label: str, cause: str) -> None:
        """A run has ended without a result."""
        self._count(label)
        if self.bar is not None or self.lines:
            (self.bar.write if self.bar is not None else print)(f"sweep: {name} failed: {cause}", file=sys.stderr)
        self._show()

    def _count(self, label: str) -> None:
        self.done += 1
        self.left[label] -= 1

    def _show(self) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"about {self.remaining_s():.0f} s left", refresh=False)
            self.bar.update()
        elif self.lines and (time.monotonic() - self.said >= EVERY_S or self.done == self.total):
            self.said = time.monotonic()
            took_s = self.said - self.began
            rate = (self.done - self.reused) / took_s if took_s > 0 else 0.0
            left = f", about {self.remaining_s():.0f} s left" * (self.done < self.total)
            line = f"sweep: {self.done} of {self.total} runs in {took_s:.0f} s ({rate:.3g} a second){left}"
            print(line, file=sys.stderr, flush=True)

    def remaining_s(self) -> float:
        """How long the runs that are left will take."""
        runs, spent_s = map(sum, zip((0, 0.0), *self.took.values(), strict=True))
        if not spent_s:
            return 0.0
        mean_s = {label: spent / count for label, (count, spent) in self.took.items()}
        computing_s = sum(count * mean_s.get(label, spent_s / runs) for label, count in self.left.items())
        began, first_s = self.first  # before that the workers were starting
        if runs <= 2 * self.workers or spent_s <= first_s:
            return computing_s / self.workers
        # at the pace so far, which knows what a run costs beside `simulate`, and how many there are at once
        return computing_s * (time.monotonic() - began) / (spent_s - first_s)
