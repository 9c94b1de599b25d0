"""Say what was measured, and how far it can be believed.

Two requests to one server share its boot: the same autotuned kernels, the same memory layout, the same clocks. Asking
that server a thousand times narrows nothing but the noise inside that boot, and boots of one recipe have been seen to
differ by up to 20 %. So **a boot is the unit**: samples are first reduced to one number per boot (the median shrugs
off a stray slow request), and every interval is made from those few numbers. Resampling requests as if they were
independent would give intervals that are far too narrow; resampling them *inside* resampled boots as well would count
their noise twice, because a boot's number already carries it.

Few boots need a wide interval and get one. With three boots no percentile bootstrap can cover more than 75 % (it
never leaves the range of its data, and that range misses the centre one time in four), so up to `BOOTSTRAP_FROM` − 1
boots the interval is Student's t; from there on it is the studentized bootstrap, which also follows a skewed
distribution. With one boot the requests are the unit, and the interval says in its `note` that it knows nothing of
other boots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.power import TTestIndPower

from sparkmoe.errors import DataError

BOOTSTRAP_FROM = 10
NORMAL_FROM = 3000  # so many units need no bootstrap, which would only take memory
RESAMPLES = 4999
Within = Literal["median", "mean"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided confidence interval.

    `low` and `high` are NaN when there is only one unit: a point without an interval, which `note` explains.
    `n` counts the units (`unit`: "boot", "request" or "problem") behind it, in the smaller arm where there are two.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n: int
    unit: str
    note: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside a known interval (1 for a ratio, 0 for a difference)."""
        return self.known and not self.low <= value <= self.high

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """`27.71 [27.50, 27.93]`, or the bare estimate when there is no interval."""
        point = f"{self.estimate * scale:.{digits}f}"
        return f"{point} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]" if self.known else point

    def as_dict(self) -> dict[str, Any]:
        """Fields as JSON knows them: an unknown end is None."""
        return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in asdict(self).items()}


def finite(values: ArrayLike, what: str) -> Floats:
    """`values` as a flat array. Raises DataError, naming `what`, where there is none or one is not finite."""
    array = np.asarray(values, dtype=float).ravel()
    if array.size == 0:
        raise DataError(f"{what} holds no value: nothing was measured, or every sample was marked spoiled.")
    if not np.isfinite(array).all():
        raise DataError(
            f"{what} holds {int((~np.isfinite(array)).sum())} values that are not finite; leave those samples out."
        )
    return array


def units(by_boot: Sequence[ArrayLike], within: Within = "median") -> tuple[Floats, str, str]:
    """(numbers, unit, note): one number per boot, or the requests themselves when there is a single boot.

    `by_boot` holds one sequence of samples per boot; `within` reduces a boot to its number.
    """
    if len(by_boot) == 0:
        raise DataError("There is no boot to summarize: the arm was never measured.")
    boots = [finite(b, f"boot {i}") for i, b in enumerate(by_boot)]
    if len(boots) == 1:
        note = "one boot: the interval covers requests to this boot only; other boots may differ by more"
        return boots[0], "request", note
    return np.array([np.median(b) if within == "median" else np.mean(b) for b in boots]), "boot", ""


def _studentized(groups: Sequence[Floats], level: float, seed: int) -> tuple[float, float, str]:
    """Interval of mean(groups[0]) − mean(groups[1]), or of the one mean, and the name of the method."""
    signs = (1.0, -1.0)
    center = sum(s * g.mean() for s, g in zip(signs, groups, strict=False))
    variance = [g.var(ddof=1) / g.size for g in groups]
    error = float(np.sqrt(sum(variance)))
    sizes = [g.size for g in groups]
    if min(sizes) < BOOTSTRAP_FROM or max(sizes) >= NORMAL_FROM or error == 0:
        # Satterthwaite's degrees of freedom; for a single group they are n − 1.
        spread_of_variance = sum(v**2 / (n - 1) for v, n in zip(variance, sizes, strict=True))
        freedom = sum(variance) ** 2 / spread_of_variance if error else 1.0
        half = float(stats.t.ppf((1 + level) / 2, freedom)) * error
        return float(center - half), float(center + half), "Student's t" if len(groups) == 1 else "Welch's t"
    rng = np.random.default_rng(seed)
    shift, spread = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for sign, group in zip(signs, groups, strict=False):
        draw = group[rng.integers(group.size, size=(RESAMPLES, group.size))]
        shift += sign * (draw.mean(axis=1) - group.mean())
        spread += draw.var(axis=1, ddof=1) / group.size
    pivots = shift[spread > 0] / np.sqrt(spread[spread > 0])
    low, high = np.quantile(pivots, [(1 + level) / 2, (1 - level) / 2])
    return float(center - low * error), float(center - high * error), "studentized bootstrap"


def summarize(
    by_boot: Sequence[ArrayLike], *, within: Within = "median", level: float = 0.95, seed: int = 0
) -> Interval:
    """The arm's typical value: the mean over boots of each boot's median (or mean), with its interval.

    Values keep their unit (ms, tok/s, …). A single boot is summarized over its requests: the estimate is `within` of
    them, the interval that of their mean, or for the median the distribution-free one from order statistics.
    """
    values, unit, note = units(by_boot, within)
    made = partial(Interval, level=level, n=values.size, unit=unit)
    if values.size == 1:
        return made(float(values[0]), np.nan, np.nan, method="none", note="one sample: no interval")
    if unit == "request" and within == "median":
        low, high = _median_interval(values, level)
        return made(float(np.median(values)), low, high, method="order statistics", note=note)
    low, high, method = _studentized([values], level, seed)
    return made(float(values.mean()), low, high, method=method, note=note)


def _median_interval(values: Floats, level: float) -> tuple[float, float]:
    """The tightest pair of order statistics that covers the median at `level`; NaN when even the extremes do not."""
    result = stats.quantile_test(values, p=0.5).confidence_interval(confidence_level=level)
    return float(result.low), float(result.high)


def ratio(
    new: Sequence[ArrayLike],
    base: Sequence[ArrayLike],
    *,
    within: Within = "median",
    paired: bool = False,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """new ÷ base as a ratio of geometric means over boots, with its interval (found on logarithms).

    `paired=True` compares boot i with boot i, which removes the machine's drift when the arms were interleaved, at
    the price of degrees of freedom. When either arm has a single boot, both are compared request by request, and
    `note` says so. Raises `DataError` on values ≤ 0 and on pairs that do not match.
    """
    single = len(new) == 1 or len(base) == 1
    arms = [_logs(new, "new", within, single), _logs(base, "base", within, single)]
    if paired and not single:
        if arms[0].size != arms[1].size:
            raise DataError(
                f"Paired boots must match: {arms[0].size} of the new arm, {arms[1].size} of the base. Use paired=False."
            )
        arms = [arms[0] - arms[1]]
    center = float(arms[0].mean() - (arms[1].mean() if len(arms) == 2 else 0.0))
    smaller = min(a.size for a in arms)
    made = partial(Interval, float(np.exp(center)), level=level, n=smaller, unit="request" if single else "boot")
    if smaller == 1:
        return made(low=np.nan, high=np.nan, method="none", note="one sample: no interval")
    low, high, method = _studentized(arms, level, seed)
    note = "one boot in an arm: the interval covers requests only; boots may differ by more" if single else ""
    return made(low=float(np.exp(low)), high=float(np.exp(high)), method=f"{method} on logarithms", note=note)


def interaction(together: Interval, alone: Interval) -> Interval:
    """What a lever gives beside another one ÷ what it gives alone: 1 where two levers multiply.

    Both are ratios, as `ratio` makes them, of four arms that are all different, so their errors add on logarithms as
    independent ones do.
    """
    half = math.hypot(*(math.log(gain.high / gain.low) / 2 for gain in (together, alone)))
    center = together.estimate / alone.estimate
    return replace(
        together, estimate=center, low=center * math.exp(-half), high=center * math.exp(half),
        n=min(together.n, alone.n), method="of two ratios, on logarithms",
    )  # fmt: skip


def _logs(by_boot: Sequence[ArrayLike], arm: str, within: Within, single: bool) -> Floats:
    """Logarithms of an arm's units: of its boots, or of all its requests when one of the arms has a single boot."""
    values = np.concatenate([units([b], within)[0] for b in by_boot]) if single else units(by_boot, within)[0]
    if (values <= 0).any():
        raise DataError(f"The {arm} arm holds a value ≤ 0 ({values.min():g}): a ratio of times needs positive ones.")
    return np.log(values)


def minimum_ratio(boots: int, relative_sd: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest relative difference (0.02 = 2 %) that `boots` boots an arm find with probability `power`.

    `relative_sd` is the standard deviation between boots of one arm ÷ their mean.
    """
    if boots < 2:
        raise DataError(f"{boots} boot per arm cannot show any difference between arms: at least 2 are needed.")
    return float(np.expm1(TTestIndPower().solve_power(nobs1=boots, alpha=1 - level, power=power) * relative_sd))
