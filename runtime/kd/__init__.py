"""kd: a native inference engine for Kimi-K2-family models.

    with kd.Engine("models/nano") as engine:
        print(engine.generate("def fib(n):", max_tokens=64).text)

`kd.Engine` loads the library into this process, `kd.Client` talks to a daemon, `kd.Tokenizer` needs neither. Each is
imported when it is first asked for: `import kd.client` never loads the library, numpy or tiktoken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kd.client import Client
    from kd.engine import Engine
    from kd.native import KdError, NativeError
    from kd.stream import KdClientError
    from kd.tokenizer import Tokenizer
    from kd.values import Completion, Event, ModelInfo, Sampling

_WHERE = {
    "Client": "kd.client",
    "Completion": "kd.values",
    "Engine": "kd.engine",
    "Event": "kd.values",
    "KdClientError": "kd.stream",
    "KdError": "kd.native",
    "ModelInfo": "kd.values",
    "NativeError": "kd.native",
    "Sampling": "kd.values",
    "Tokenizer": "kd.tokenizer",
}

__all__ = [
    "Client",
    "Completion",
    "Engine",
    "Event",
    "KdClientError",
    "KdError",
    "ModelInfo",
    "NativeError",
    "Sampling",
    "Tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kd' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
