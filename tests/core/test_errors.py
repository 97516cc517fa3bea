"""Exceptions keep their builtin bases and survive the way between processes."""

import pickle

import pytest

from daric_rag import errors


@pytest.mark.parametrize(
    ("daric", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.PromptError, ValueError),
        (errors.WireError, ValueError),
        (errors.EngineError, RuntimeError),
        (errors.EngineUnavailableError, ConnectionError),
        (errors.AuthenticationError, PermissionError),
        (errors.StoreError, OSError),
    ],
)
def test_each_is_also_the_builtin_a_caller_would_catch(daric, builtin):
    assert issubclass(daric, builtin)
    assert issubclass(daric, errors.DaricError)


def test_prompt_too_long_says_how_much_to_remove():
    error = errors.PromptTooLongError(prompt_len=1000, limit=900)
    assert (error.prompt_len, error.limit, error.excess) == (1000, 900, 100)
    assert "remove at least 100 tokens" in str(error)


def test_prompt_too_long_pickles():
    error = pickle.loads(pickle.dumps(errors.PromptTooLongError(1000, 900)))
    assert error.excess == 100
    assert str(error) == str(errors.PromptTooLongError(1000, 900))


def test_all_names_every_exception_and_only_those():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(errors.__all__) == defined
