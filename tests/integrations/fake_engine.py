"""The seam of the integrations' unit tests: an engine that answers at once."""

from dataclasses import replace
from types import SimpleNamespace

from daric_rag.engine import Completion, Delta, ReuseStats

REUSE = ReuseStats(prompt_tokens=10, disjoint_hit_tokens=4, gpu_prefix_tokens=2)
DONE = Completion("Two words.", (1, 2), "stop", None, 0.5, REUSE)
LOGPROBS = ({1: -0.1, 5: -2.0}, {6: -0.5, 2: -1.5})


def deltas(done):
    first, second = [(step,) for step in done.logprobs or ()] or (None, None)
    return [
        Delta(done.text[:4], (1,), first),
        Delta(done.text[4:], (2,), second, done),
    ]


class FakeEngine:
    """A prompt has as many tokens as its texts have words."""

    max_model_len = 100

    def __init__(self):
        self.asked, self.warmed = [], []

    def layout(self, prompt):
        num_words = sum(len(text.split()) for _, text in prompt.named_texts())
        return SimpleNamespace(prompt_len=num_words)

    def generate(self, prompt, **options):
        self.asked.append((prompt, options))
        return DONE if options["logprobs"] is None else replace(DONE, logprobs=LOGPROBS)

    def stream(self, prompt, **options):
        yield from deltas(self.generate(prompt, **options))

    async def agenerate(self, prompt, **options):
        return self.generate(prompt, **options)

    async def astream(self, prompt, **options):
        for delta in self.stream(prompt, **options):
            yield delta

    def prewarm(self, documents, *, namespace=None):
        self.warmed.append((documents, namespace))
        return len(documents)
