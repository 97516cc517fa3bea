"""The test oracle: tiny checkpoints, a naive dense DARIC, and token prompts.

Nothing here imports `daric_rag` or vLLM, so a fault in either cannot hide in the
oracle as well.

- `tiny_models`: seeded random float32 checkpoints of every supported family.
- `dense`: DARIC written out plainly over a transformers model; `attention` and
  `outputs` are its arithmetic and its results.
- `prompts`: seeded token prompts and the hit patterns they are tested with.
"""
