"""The one configuration object, translated once and immutable afterwards.

``DaricConfig`` travels through vLLM's ``kv_connector_extra_config`` as the plain
mapping that ``to_dict`` gives and ``from_dict`` takes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from daric_rag.errors import ConfigError

__all__ = [
    "GIB",
    "Alignment",
    "DaricConfig",
    "EvictionName",
    "KvStorageName",
    "MtafName",
    "PolicyName",
    "shown",
]

PolicyName = Literal["daric", "equal"]
MtafName = Literal["linear", "log", "exp"]
Alignment = Literal["exact", "block"]
EvictionName = Literal["frequency", "lru"]
KvStorageName = Literal["model", "fp8", "int8"]

GIB = 1024**3

MAX_NAMESPACE_LEN = 256
"""Characters; a namespace is stored beside every document."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "policy": ("daric", "equal"),
    "mtaf": ("linear", "log", "exp"),
    "alignment": ("exact", "block"),
    "eviction": ("frequency", "lru"),
    "kv_storage": ("model", "fp8", "int8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DaricConfig:
    """How prompts are laid out, which tokens are recomputed, how much is stored.

    Attributes:
        policy: Which tokens are recomputed: ``"daric"`` (Algorithm 1) or ``"equal"``
            (the same number of tokens at every chunk's head).
        avg_chunk_budget: n_avg of section 3.2.2, in tokens, at least 1. A prompt of M
            chunks recomputes at most M * n_avg tokens beside its question.
        initial_ratio: r of section 3.2.2, in (0, 1): the share of n_avg that the
            second chunk's head gets. Used by ``policy="daric"`` only.
        mtaf: f of equation 4, how head windows grow with the chunk's index. Used by
            ``policy="daric"`` only.
        alignment: ``"exact"`` keeps the caller's token ids; ``"block"`` pads every
            chunk to a block boundary as in section 3.3.1 (this changes the output).
        namespace: Tenant, at most `MAX_NAMESPACE_LEN` characters. Nothing cached in
            one namespace is visible in another.
        max_segment_len: Longest unit of index and storage, in tokens, at least 1.
        delimiter: Text that separates chunks in delimited prompts, or None when only
            lists of chunks are accepted. It never reaches the model.
        host_bytes: Capacity of the host-memory tier, in bytes, at least 1.
        disk_bytes: Capacity of the disk tier, in bytes, at least 1.
        require_disk: Whether memory keeps nothing that the disk tier does not take,
            so that computing waits for a slow disk. For engines that pre-warm, where a
            document that is in memory alone is gone with the job; one that answers
            rather goes on without the disk copy.
        eviction: Which documents go first when a tier is full: ``"frequency"`` (those
            of least recent and frequent use, so that a flood of new documents does not
            wipe the popular ones) or ``"lru"``.
        kv_storage: ``"model"`` stores keys and values in the model's own dtype;
            ``"fp8"`` and ``"int8"`` halve the store and change the output slightly.
        encryption_key_file: File with the 32-byte key that the disk tier is encrypted
            with; None: the environment's DARIC_STORE_KEY or DARIC_STORE_KEY_FILE, and
            no encryption if neither is set.

    Raises:
        ConfigError: A value has the wrong type or lies outside its range.
    """

    policy: PolicyName = "daric"
    avg_chunk_budget: int = 32
    initial_ratio: float = 0.1
    mtaf: MtafName = "linear"
    alignment: Alignment = "exact"
    namespace: str = "default"
    max_segment_len: int = 256
    delimiter: str | None = None
    host_bytes: int = 4 * GIB
    disk_bytes: int = 32 * GIB
    require_disk: bool = False
    eviction: EvictionName = "frequency"
    kv_storage: KvStorageName = "model"
    encryption_key_file: str | None = None

    def __post_init__(self) -> None:
        """Check every field, so that no module downstream has to."""
        for name in _CHOICES:
            _check_choice(name, getattr(self, name))
        _check_positive(
            "avg_chunk_budget",
            self.avg_chunk_budget,
            unit="tokens",
            hint='; to recompute nothing ask for reuse="full_reuse" in the request',
        )
        _check_positive("max_segment_len", self.max_segment_len, unit="tokens")
        _check_positive("host_bytes", self.host_bytes, unit="bytes")
        _check_positive("disk_bytes", self.disk_bytes, unit="bytes")
        if not isinstance(self.require_disk, bool):
            raise ConfigError(
                f"require_disk is {shown(self.require_disk)}; it must be True or False"
            )
        _check_ratio("initial_ratio", self.initial_ratio)
        _check_text("namespace", self.namespace)
        if len(self.namespace) > MAX_NAMESPACE_LEN:
            raise ConfigError(
                f"namespace has {len(self.namespace)} characters; it must have at most "
                f"{MAX_NAMESPACE_LEN}: use an id or a digest"
            )
        if self.delimiter is not None:
            _check_text("delimiter", self.delimiter, hint=" or None")
        if self.encryption_key_file is not None:
            _check_text(
                "encryption_key_file", self.encryption_key_file, hint=" or None"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain JSON-able values; `from_dict` inverts it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> DaricConfig:
        """Build a config from field names and values; absent fields keep defaults.

        Raises:
            ConfigError: A key is unknown (the nearest known name is suggested) or a
                value is refused.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"a configuration must be a mapping of field names to values, not "
                f"{type(mapping).__name__}"
            )
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(_unknown_key(key, known))
        return cls(**mapping)

    def policy_fields(self) -> dict[str, str | int | float]:
        """Return the fields that decide which KV a prompt ends up with.

        Two requests whose values differ here must never share prefix-cache blocks, so
        these go into the cache salt. Capacities and segment length change where bytes
        lie, never what they are, and stay out.
        """
        return {
            "policy": self.policy,
            "avg_chunk_budget": self.avg_chunk_budget,
            "initial_ratio": self.initial_ratio,
            "mtaf": self.mtaf,
            "alignment": self.alignment,
        }


def shown(value: object) -> str:
    """Return a value as an error's text may quote it, whatever a client sent.

    Short, and never failing itself: Python refuses to print huge ints, and nesting
    may exhaust its stack.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_choice(name: str, value: object) -> None:
    choices = _CHOICES[name]
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {allowed}")


def _check_positive(name: str, value: object, *, unit: str, hint: str = "") -> None:
    # bool is a subclass of int, but True tokens is a mistake, not a budget of 1.
    valid = isinstance(value, int) and not isinstance(value, bool)
    if not valid or not 1 <= value < 1 << 62:  # type: ignore[operator]
        raise ConfigError(
            f"{name} is {shown(value)}; it must be an int of at least 1 ({unit}){hint}"
        )


def _check_ratio(name: str, value: object) -> None:
    valid = isinstance(value, float) and math.isfinite(value) and 0.0 < value < 1.0
    if not valid:
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a float above 0 and below 1"
        )


def _check_text(name: str, value: object, *, hint: str = "") -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {shown(value)}; it must be a non-empty str{hint}")


def _unknown_key(key: object, known: list[str]) -> str:
    nearest = difflib.get_close_matches(shown(key), known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return (
        f"{shown(key)} is not a field of DaricConfig; {hint}Known fields: "
        f"{', '.join(known)}"
    )
