"""Every error a user can meet, in one tree.

    MarftError
    ├── ConfigError        (ValueError)       a flag, a YAML key, a name or a task file is wrong
    ├── LogError           (ValueError)       the logs cannot be used for what was asked
    ├── RewardError        (ValueError)       rewards are missing, not finite or of the wrong type
    ├── AdapterError       (ValueError)       an adapter is missing, damaged or not servable
    ├── RegistryError      (RuntimeError)     adapters/ cannot be changed as asked
    ├── ServerError        (ConnectionError)  a server is down, too slow, or answered with an error
    │   └── SwapError                         a swap stopped; the old version still serves
    ├── EngineError        (RuntimeError)     a model engine could not be started or died
    ├── TrainingError      (RuntimeError)     training stopped by a guard
    │   ├── ReplayError                       the recorded log-probabilities are not this model's
    │   └── NothingToLearn                    no reward spread or trainable turn; nothing changed
    ├── IntegrationError   (TypeError)        an object is from no supported runtime
    └── MissingExtraError  (ImportError)      an optional dependency is not installed

A message says what was seen, where, and what to do. The command line prints it on one line and
exits with code 2.
"""


class MarftError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(MarftError, ValueError):
    """A flag, YAML key, name or task file is wrong."""


class LogError(MarftError, ValueError):
    """The logs cannot be used for what was asked."""


class RewardError(MarftError, ValueError):
    """Rewards are missing, not finite or of the wrong type."""


class AdapterError(MarftError, ValueError):
    """An adapter is missing, damaged, or one that a server would refuse."""


class RegistryError(MarftError, RuntimeError):
    """The adapter registry cannot be changed as asked."""


class ServerError(MarftError, ConnectionError):
    """A server is down, too slow, or answered with an error."""


class SwapError(ServerError):
    """A swap stopped half-way; the old version still serves."""


class EngineError(MarftError, RuntimeError):
    """A model engine could not be started, or died."""


class TrainingError(MarftError, RuntimeError):
    """Training was stopped by a guard."""


class ReplayError(TrainingError):
    """The recorded log-probabilities are not those of the model at hand."""


class NothingToLearn(TrainingError):
    """No reward spread or no trainable turn; no adapter was changed."""


class IntegrationError(MarftError, TypeError):
    """An object that no installed integration knows how to record."""


class MissingExtraError(MarftError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, *, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the extra {extra!r}: pip install 'marft-agents[{extra}]'"
        )
        self.extra = extra
