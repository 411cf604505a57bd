"""Metrics as rows of a table: what each is called, what it means, and where its value is. Pure but for Prometheus' own
classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

S = TypeVar("S")


class Kind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """Begins anew with its process. Prometheus adds `_total` to the name."""
    INFO = "info"
    """1, with what is said as labels. `_info` is added to the name."""
    HISTOGRAM = "histogram"


SUFFIXES = {Kind.COUNTER: "_total", Kind.INFO: "_info"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of a histogram: how many were at most each bound, ascending, the last one infinite; and their sum."""

    at_most: tuple[tuple[float, int], ...]
    total: float


Values = float | None | Mapping[str, float] | Mapping[tuple[str, ...], float] | Mapping[str, str] | Mapping[str, Spread]
"""None: not known now, and left out. By label where there is one, by all of them where there are several."""


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    kind: Kind
    name: str
    text: str
    of: Callable[[S], Values]
    labels: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """As Prometheus has it."""
        return self.name + SUFFIXES.get(self.kind, "")


def families(rows: Iterable[Row[S]], source: S) -> Iterator[Metric]:
    """As `source` has them now."""
    for row in rows:
        values = row.of(source)
        if values is not None:
            yield _family(row, values)


def _family(row: Row[S], values: Values) -> Metric:
    if row.kind is Kind.INFO:
        assert isinstance(values, Mapping)
        return InfoMetricFamily(row.name, row.text, {str(name): str(value) for name, value in values.items()})
    if row.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(row.name, row.text, labels=row.labels)
        assert isinstance(values, Mapping)
        for label, spread in values.items():
            assert isinstance(spread, Spread)
            buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in spread.at_most]
            histogram.add_metric([str(label)], buckets, spread.total)
        return histogram
    family = (CounterMetricFamily if row.kind is Kind.COUNTER else GaugeMetricFamily)(
        row.name, row.text, labels=row.labels
    )
    by_label = values if isinstance(values, Mapping) else {(): values}
    for label, value in by_label.items():
        assert isinstance(value, int | float)
        family.add_metric([label] if isinstance(label, str) else [*label], value)
    return family
