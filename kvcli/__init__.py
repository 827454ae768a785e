"""`kvcli`: local inference whose heart is the KV cache.

    import kvcli

    with kvcli.load("smollm2", cache_type="int8", ctx=8192) as model:
        for piece in model.chat([{"role": "user", "content": "Why is the sky blue?"}]):
            print(piece, end="", flush=True)

`load` opens a model and `estimate` says what one would need. Importing this package imports neither torch nor numpy;
`load` does. A model and what belongs to it is for one thread at a time.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing itself takes milliseconds, and `kv` starts here
if TYPE_CHECKING:
    from kvcli.api.answers import Answer as Answer
    from kvcli.api.estimates import Choice as Choice
    from kvcli.api.estimates import Estimate as Estimate
    from kvcli.api.estimates import estimate as estimate
    from kvcli.api.loading import load as load
    from kvcli.api.model import Model as Model
    from kvcli.api.model import Sequence as Sequence
    from kvcli.errors import CacheFileError as CacheFileError
    from kvcli.errors import ContextOverflow as ContextOverflow
    from kvcli.errors import DeviceError as DeviceError
    from kvcli.errors import DoesNotFit as DoesNotFit
    from kvcli.errors import DownloadError as DownloadError
    from kvcli.errors import KVError as KVError
    from kvcli.errors import ModelError as ModelError
    from kvcli.errors import OutputError as OutputError
    from kvcli.errors import UsageError as UsageError
    from kvcli.options import CacheOptions as CacheOptions
    from kvcli.options import PromptCacheOptions as PromptCacheOptions
    from kvcli.options import SampleOptions as SampleOptions
    from kvcli.runtime.text.grammar import json_schema as json_schema

# Every public name, by the module that has it.
_NAMES = {
    "kvcli.api.answers": ("Answer",),
    "kvcli.api.estimates": ("Choice", "Estimate", "estimate"),
    "kvcli.api.loading": ("load",),
    "kvcli.api.model": ("Model", "Sequence"),
    "kvcli.errors": (
        "CacheFileError",
        "ContextOverflow",
        "DeviceError",
        "DoesNotFit",
        "DownloadError",
        "KVError",
        "ModelError",
        "OutputError",
        "UsageError",
    ),
    "kvcli.options": ("CacheOptions", "PromptCacheOptions", "SampleOptions"),
    "kvcli.runtime.text.grammar": ("json_schema",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvcli' has no attribute '{name}'")
    import importlib

    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
