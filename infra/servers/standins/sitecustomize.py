"""Read by Python at its start, in the environment of an inference server on a host without a GPU.

torchvision's compiled operators do not load beside a CPU build of torch, and importing it then fails on describing
operators that do not exist. They are declared here, just before, and never called.

SGLang registers memory of the host with CUDA where it tells which experts tokens went through, also on a host without
CUDA. There it is left as it is.

vLLM packs a copy of the output layer's weights for the CPU. Where they are those of the embedding (tied), new weights
reach the embedding alone, and the copy stays what it was (vLLM 0.32). There the weights themselves are used.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
BACKWARD = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")


class _BeforeTorchvision(MetaPathFinder):
    declared: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision" and self.declared is None:
            import torch

            if torch.version.cuda is None:
                self.declared = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
                for operator in (*OPERATORS, *(f"_{name}_backward" for name in BACKWARD)):
                    self.declared.define(f"{operator}(Tensor input) -> Tensor")


REGISTERS = "sglang.srt.mem_cache.pool_host.common"


PACKS = "vllm.model_executor.layers.vocab_parallel_embedding"


class _Behind(MetaPathFinder):
    """Changes a module once it is loaded, where torch has no CUDA."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != self._name:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return found
        run: Any = found.loader.exec_module

        def changed(module: Any) -> None:
            import torch

            run(module)
            if torch.version.cuda is None:
                self._change(module)

        found.loader.exec_module = changed  # type: ignore[method-assign]
        return found


def _without_registration(module: Any) -> None:
    module._cuda_host_register = lambda *given: None


def _without_packing(module: Any) -> None:
    def process(method: Any, layer: Any) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    module.UnquantizedEmbeddingMethod.process_weights_after_loading = process


sys.meta_path[:0] = [_BeforeTorchvision(), _Behind(REGISTERS, _without_registration), _Behind(PACKS, _without_packing)]
