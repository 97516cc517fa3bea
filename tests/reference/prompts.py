"""Seeded token prompts, recompute sets and hit patterns for tests.

Standard library only. Chunk lengths avoid block multiples on purpose: every boundary
then falls inside a block, which is where slot arithmetic goes wrong.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""Half-open `[start, end)` in token positions."""

TokenIds = tuple[int, ...]

MIXED_LENS = (37, 1, 129, 63, 301, 5, 32, 95, 23)
"""Chunk lengths: one token, shorter than a block, a block, more than a segment."""

LONG_LENS = (41, 517, 255, 257, 511, 389, 603, 29)
"""About 2,600 tokens, each document cut into several segments."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as its chunks: system prompt first, question last.

    Attributes:
        chunks: Token ids of each chunk, none empty.
    """

    chunks: tuple[TokenIds, ...]

    @property
    def token_ids(self) -> TokenIds:
        """All L token ids."""
        return tuple(token for chunk in self.chunks for token in chunk)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Half-open chunk spans that partition `[0, L)`."""
        ends = [sum(map(len, self.chunks[: i + 1])) for i in range(len(self.chunks))]
        return tuple(zip([0, *ends], ends, strict=False))

    @property
    def prompt_len(self) -> int:
        """L, in tokens."""
        return sum(map(len, self.chunks))

    def reordered(self, order: Sequence[int]) -> "Prompt":
        """The same chunks taken by index; leaving out and repeating are allowed."""
        return Prompt(tuple(self.chunks[i] for i in order))

    def replaced(self, index: int, chunk: Sequence[int]) -> "Prompt":
        """A copy with another chunk at `index`."""
        chunks = list(self.chunks)
        chunks[index] = tuple(chunk)
        return Prompt(tuple(chunks))


@dataclass(frozen=True)
class Scenario:
    """What is stored beforehand, and the prompt that then comes.

    Attributes:
        name: For test ids.
        prompt: The request. Its last chunk, the question, is never stored.
        stored: Documents whose caches are in the store already.
    """

    name: str
    prompt: Prompt
    stored: frozenset[TokenIds]

    @property
    def hits(self) -> tuple[bool, ...]:
        """Whether each chunk of the prompt is stored."""
        return tuple(chunk in self.stored for chunk in self.prompt.chunks)


def random_chunks(
    seed: int, lens: Sequence[int], vocab: int, first_id: int = 16
) -> tuple[TokenIds, ...]:
    """Draws chunks of the given lengths.

    Args:
        seed: Same seed and lengths, same chunks.
        lens: Tokens of each chunk, 1 or more.
        vocab: Ids are drawn from `[first_id, vocab)`.
        first_id: Skips the special tokens of the tiny tokenizer.

    Returns:
        One tuple of ids per length.

    Raises:
        ValueError: A length is below 1, or no id is left to draw.
    """
    if vocab <= first_id or min(lens, default=1) < 1:
        raise ValueError(f"cannot draw {lens} tokens from [{first_id}, {vocab})")
    draw = random.Random(seed)
    return tuple(
        tuple(draw.randrange(first_id, vocab) for _ in range(length)) for length in lens
    )


def random_prompt(
    seed: int, lens: Sequence[int] = MIXED_LENS, vocab: int = 512
) -> Prompt:
    """A prompt of random chunks; see `random_chunks`."""
    return Prompt(random_chunks(seed, lens, vocab))


def as_windows(positions: Iterable[int]) -> tuple[Span, ...]:
    """The sorted, disjoint, non-touching windows that cover exactly `positions`."""
    windows: list[Span] = []
    for position in sorted(set(positions)):
        if windows and windows[-1][1] == position:
            windows[-1] = (windows[-1][0], position + 1)
        else:
            windows.append((position, position + 1))
    return tuple(windows)


def head_windows(
    prompt: Prompt, head_len: int, latest_len: int = 1
) -> tuple[Span, ...]:
    """A plain recompute set: chunk heads, the question, the latest tokens.

    Written over sets of positions so as to share nothing with the real selection.

    Args:
        prompt: The prompt.
        head_len: Tokens at the start of chunks 2 to M, clamped to the chunk; 0 gives
            full reuse apart from the question.
        latest_len: Tokens at the end of the prompt, clamped to it.

    Returns:
        Half-open windows, sorted, disjoint and non-touching.
    """
    positions = set(range(*prompt.spans[-1]))
    for start, end in prompt.spans[1:]:
        positions |= set(range(start, min(start + head_len, end)))
    end = prompt.prompt_len
    return as_windows(positions | set(range(max(0, end - latest_len), end)))


def scattered_windows(seed: int, prompt: Prompt, num_windows: int) -> tuple[Span, ...]:
    """Many runs of one to four tokens anywhere, and the last token.

    Fewer than `num_windows` remain where runs happen to touch.
    """
    draw = random.Random(seed)
    positions = {prompt.prompt_len - 1}
    for _ in range(num_windows):
        start = draw.randrange(prompt.prompt_len)
        positions |= set(
            range(start, min(start + draw.randint(1, 4), prompt.prompt_len))
        )
    return as_windows(positions)


def scenarios(
    seed: int, lens: Sequence[int] = MIXED_LENS, vocab: int = 512
) -> tuple[Scenario, ...]:
    """The hit patterns every runtime must serve alike.

    Args:
        seed: Seed of the token ids.
        lens: Chunk lengths, four or more; the last is the question.
        vocab: Vocabulary size.

    Returns:
        All hit; all miss; a hole (every other document missing); only the first half
        stored (contiguous hits); only the second half stored (disjoint hits);
        documents reordered; one document twice, missing; a single chunk, missing.

    Raises:
        ValueError: Fewer than four lengths.
    """
    if len(lens) < 4:
        raise ValueError(f"scenarios need four or more chunks, not {len(lens)}")
    prompt = random_prompt(seed, lens, vocab)
    documents = prompt.chunks[:-1]
    half = len(documents) // 2
    order = [*range(len(lens))]
    return (
        Scenario("all_hit", prompt, frozenset(documents)),
        Scenario("all_miss", prompt, frozenset()),
        Scenario("hole", prompt, frozenset(documents[::2])),
        Scenario("contiguous", prompt, frozenset(documents[:half])),
        Scenario("disjoint", prompt, frozenset(documents[half:])),
        Scenario(
            "reordered",
            prompt.reordered([0, *order[-2:0:-1], order[-1]]),
            frozenset(documents),
        ),
        Scenario("repeated", prompt.reordered([0, 2, 1, 2, order[-1]]), frozenset()),
        Scenario("monolithic", Prompt((prompt.token_ids,)), frozenset()),
    )
