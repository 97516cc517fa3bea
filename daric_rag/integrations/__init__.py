"""Adapters for RAG frameworks. They import the engine protocol and prompts only."""
