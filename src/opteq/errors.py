"""Exceptions raised by opteq. Each message says what is wrong and what to do about it."""


class OpteqError(Exception):
    """Base class of every error that opteq raises on purpose."""


class ShapeError(OpteqError, ValueError):
    """A tensor has a shape (or a dtype) that does not fit the model."""


class ConfigError(OpteqError, ValueError):
    """Options that do not exist, contradict each other or lie outside their range."""


class NonFiniteError(OpteqError, ValueError):
    """An input, or the weights, contain NaN or infinite values."""


class ConvergenceError(OpteqError, RuntimeError):
    """A solve did not reach its tolerance and the caller asked for that to be an error."""
