"""Tests of the pure core: no torch, no vLLM, no files."""
