"""Tests of daric_rag."""
