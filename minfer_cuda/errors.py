"""Every failure that is not a bug of ours: the message has the values and a hint."""


class MinferError(Exception):
    """Base class. The CLI prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(MinferError):
    """A bad argument or combination of arguments."""

    exit_code = 2


class ModelFileError(MinferError):
    """The file is not a GGUF, is damaged, or contradicts itself."""


class UnsupportedModelError(MinferError):
    """A valid file that this engine does not run: architecture, tensor type, head size, ..."""


class TokenizerError(MinferError):
    """The vocabulary cannot be used, or text cannot be encoded."""


class TemplateError(MinferError):
    """The chat template is missing or does not render these messages."""


class GrammarError(MinferError):
    """A grammar that cannot go on: no token fits, or it has grown too complex."""


class SessionError(MinferError):
    """A saved conversation cannot be read or written."""


class StoreError(MinferError):
    """A name that stands for no model or several, or a model that cannot be fetched or removed."""


class ContextFullError(MinferError):
    """A position at or past n_ctx was asked for. Nothing has been written."""

    def __init__(self, needed: int, n_ctx: int, hint: str = "raise --n-ctx or shorten the prompt"):
        super().__init__(f"{needed} positions needed, n_ctx is {n_ctx}: {hint}")
        self.needed = needed
        self.n_ctx = n_ctx


class DeviceError(MinferError):
    """No usable device, or the device failed."""


class OutOfMemoryError(DeviceError):
    """Device or host memory does not suffice."""


class KernelError(DeviceError):
    """A kernel did not compile, was launched wrongly, or failed."""


class NumericsError(MinferError):
    """Logits are not finite."""
