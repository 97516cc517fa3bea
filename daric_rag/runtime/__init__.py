"""vLLM's side: an embedded engine, and the connector and worker it runs with.

Imported lazily and only where vLLM is installed; nothing here patches it.
"""
