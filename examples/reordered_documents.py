"""Ask over ten documents, then over the same ones in another order.

The first question computes and stores every document; the second one finds them all,
each at another position, and answers several times sooner. Run it with

    python examples/reordered_documents.py
"""

from __future__ import annotations

from daric_rag import ChunkedPrompt, EmbeddedEngine
from daric_rag.data import load_demo_sets


def main() -> None:
    """Answer one question three times and say where the prompt's KV came from."""
    record = load_demo_sets()["device_manual"][0]
    documents = list(record.chunks)
    rounds = (
        ("full prefill", documents, "off"),
        ("first time", documents, "daric"),
        ("reordered", documents[::-1], "daric"),
    )
    with EmbeddedEngine("smollm2-135m", store=":memory:") as engine:
        for name, order, reuse in rounds:
            prompt = ChunkedPrompt(
                system=record.system, documents=order, question=record.question
            )
            done = engine.generate(prompt, max_tokens=24, reuse=reuse)
            print(
                f"{name:>12}: {done.ttft_s * 1e3:5.0f} ms to the first of "
                f"{done.reuse.prompt_tokens} tokens' answer; {done.reuse.hit_tokens} "
                f"loaded, {done.reuse.recomputed_tokens} recomputed"
            )


if __name__ == "__main__":
    main()
