"""From a prompt and options to a submission: checked, laid out, ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from daric_rag.engine import GenerationOptions, Prompt
from daric_rag.errors import ConfigError, PromptError
from daric_rag.input_processor import InputProcessor
from daric_rag.layout import PromptLayout
from daric_rag.runtime.request_stream import Submission

__all__ = ["SubmissionMaker"]


@dataclass(frozen=True, slots=True)
class SubmissionMaker:
    """Client process. Refuses what an engine could not run, before it is asked to.

    Attributes:
        processor: Lays prompts out.
        vocab_size: Token ids lie below it; None if unknown.
        scheduling_policy: The engine's, ``"fcfs"`` or ``"priority"``; None if unknown.
        priority_mend: How to get an engine that knows priorities.
    """

    processor: InputProcessor
    vocab_size: int | None = None
    scheduling_policy: str | None = None
    priority_mend: str = ""

    def options(self, given: dict[str, Any]) -> GenerationOptions:
        """Return a call's keyword arguments, checked.

        Raises:
            ConfigError: One is unknown, or cannot be used with this engine.
        """
        known = GenerationOptions.__dataclass_fields__
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"{name!r} is not a generation option; known: {', '.join(known)}"
                )
        options = GenerationOptions(**given)
        if options.priority and self.scheduling_policy not in ("priority", None):
            raise ConfigError(
                f"priority is {options.priority} and this engine schedules requests "
                f"as they come; {self.priority_mend}"
            )
        return options

    def of_prompt(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        arrival_time: float | None = None,
    ) -> Submission:
        """Lay a prompt out.

        Raises:
            PromptError: It cannot be run.
        """
        submission = self._finish(self.processor.layout(prompt), options)
        return replace(submission, arrival_time=arrival_time)

    def of_document(
        self, text: str, title: str, namespace: str | None = None
    ) -> Submission:
        """Lay out a document that is to be stored, and answered by nothing.

        Raises:
            PromptError: It cannot be run.
        """
        options = GenerationOptions(max_tokens=1, namespace=namespace)
        layout = self.processor.document_layout(text, title)
        return self._finish(layout, options, save_tail=True)

    def _finish(
        self,
        layout: PromptLayout,
        options: GenerationOptions,
        *,
        save_tail: bool = False,
    ) -> Submission:
        max_tokens = self.processor.check_len(layout, options.max_tokens)
        if self.vocab_size is not None and max(layout.token_ids) >= self.vocab_size:
            raise PromptError(
                f"the prompt has token id {max(layout.token_ids)} and the model knows "
                f"[0, {self.vocab_size}); pass ids of this model's own tokenizer"
            )
        wire = None
        if options.reuse != "off":
            wire = self.processor.request_wire(
                layout,
                reuse=options.reuse,
                save_tail=save_tail,
                namespace=options.namespace,
                conversation=options.conversation,
                trace=options.trace,
            )
        return Submission(layout, wire, replace(options, max_tokens=max_tokens))
