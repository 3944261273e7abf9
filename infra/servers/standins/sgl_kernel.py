"""A stand-in for SGLang's CUDA kernels on a host without a GPU: every name can be imported, none can be called."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "9999.0"
__path__: list[str] = []


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU; this environment is the one for hosts without")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Missing) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _attribute(module.__name__, name)  # type: ignore[method-assign]


def _attribute(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{module}.{name}")


def __getattr__(name: str) -> Any:
    return _attribute(__name__, name)


sys.meta_path.append(_Finder())
