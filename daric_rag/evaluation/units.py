"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

from daric_rag.errors import ConfigError

__all__ = ["human_age", "human_bytes", "parse_bytes", "parse_duration"]

_BYTES = {
    unit.lower(): base**power
    for base, units in ((1000, "B kB MB GB TB PB"), (1024, "B KiB MiB GiB TiB PiB"))
    for power, unit in enumerate(units.split())
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGES = (("d", 86400), ("h", 3600), ("min", 60))
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that a size such as ``200GB``, ``32GiB`` or ``4096`` means.

    Raises:
        ConfigError: It is no such size, or below one byte.
    """
    number, unit = _split(text)
    factor = _BYTES.get(unit or "b")
    nbytes = 0 if number is None or factor is None else int(number * factor)
    if not 1 <= nbytes < 1 << 62:
        raise ConfigError(f"{text!r} is no size: write it as 200GB, 32GiB or 4096")
    return nbytes


def parse_duration(text: str) -> float:
    """Return the seconds that a time such as ``90s``, ``12h`` or ``7d`` means.

    Raises:
        ConfigError: It is no such time.
    """
    number, unit = _split(text)
    factor = _SECONDS.get(unit)
    if number is None or factor is None:
        raise ConfigError(f"{text!r} is no time: write it as 90s, 30m, 12h, 7d or 2w")
    return number * factor


def human_bytes(nbytes: float) -> str:
    """Return a size in at most three digits: ``"873 B"``, ``"1.2 GiB"``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1000:
            break
        unit = larger
        nbytes /= 1024
    digits = 1 if nbytes < 9.95 and unit != "B" else 0
    return f"{nbytes:.{digits}f} {unit}"


def human_age(seconds: float) -> str:
    """Return how long ago something was: ``"now"``, ``"3 h ago"``."""
    for unit, length in _AGES:
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"


def _split(text: str) -> tuple[float | None, str]:
    found = _QUANTITY.fullmatch(text.strip().lower())
    return (None, "") if found is None else (float(found[1]), found[2])
