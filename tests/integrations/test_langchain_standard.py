"""LangChain's own suite for chat models, without and with the real small model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from daric_rag import EmbeddedEngine
from daric_rag.integrations.langchain import ChatDaric

# The package's own attribute of that name is a function.
lc_load: Any = sys.modules["langchain_core.load.load"]


class _Abilities:
    """What the suite is told of ChatDaric; pictures, sound and PDF it has none of."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatDaric

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        # An embedded engine is one model, loaded at start: a request with another is
        # refused, with the mend in the error's text.
        return False


@pytest.fixture(scope="module")
def engine(real_model: Path) -> Iterator[EmbeddedEngine]:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096}
    with EmbeddedEngine(str(real_model), store=":memory:", **options) as opened:
        yield opened


class TestUnit(_Abilities, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @pytest.fixture(autouse=True)
    def _trusted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if we were on LangChain's own list of partners, which are all it loads."""
        path = ("daric_rag", "integrations", "langchain", "ChatDaric")
        monkeypatch.setitem(lc_load.ALL_SERIALIZABLE_MAPPINGS, path, path)
        monkeypatch.setattr(lc_load, "_default_class_paths_cache", {})

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], Any]:
        params = {"base_url": "http://server:8000", "model": "smollm2-135m"}
        return {"DARIC_API_KEY": "the-key"}, params, {"api_key": "the-key"}


@pytest.mark.engine
@pytest.mark.real_model
class TestIntegration(_Abilities, ChatModelIntegrationTests):
    """On one engine for all tests."""

    engine: EmbeddedEngine

    @pytest.fixture(autouse=True)
    def _on_engine(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Of 135 million parameters, the model answers in words unless it is told to
        # call a tool, and the suite's agent does not tell it. Unless repeating itself
        # costs it something, it ends no sentence, and an answer cut short is refused.
        return {
            "engine": self.engine,
            "tool_choice": "any",
            "max_tokens": 256,
            "frequency_penalty": 0.3,
        }

    @property
    def enable_vcr_tests(self) -> bool:
        # Cassettes replay HTTP, of which an embedded engine has none.
        return False
