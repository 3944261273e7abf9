"""The origin of a model's first weights: a whole model, or its weights one by one for ranks that keep parts of them.

Decision: rank 0 reads a directory that not every rank can read, on hosts without a common disk, one weight at a time.
It also loads files whole, through transformers, if their tensors are not blocks of the model's weights.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import AutoConfig

from rollouts_core.config import Dtype, ScratchModel
from rollouts_core.errors import BadInput
from rollouts_core.inference.weights import stored
from rollouts_core.training.blank import blank_model, drawn_weights
from rollouts_core.training.models import DTYPES, drawn_model, load_hf_model, refuse_adapter, scratch_config
from rollouts_core.training.weight_files import Block, NotBlocks, WeightFiles

SAMPLE_BYTES = 4096


class Readable(Protocol):
    """A weight of which blocks can be had; a tensor is one."""

    def __getitem__(self, block: Block) -> torch.Tensor: ...


@dataclass(frozen=True)
class Origin:
    """A model's config, as transformers writes it, and its weights: files, or a seed that they are drawn from.

    JSON data, so that rank 0 can tell it to the others.
    """

    config: dict[str, Any]
    dtype: Dtype
    name: str | None = None
    """The place of the files: a directory, or a repository of the hub."""
    revision: str | None = None
    trust_remote_code: bool = False
    seed: int | None = None

    def whole(self, device: str) -> Any:
        """The model with its weights. Raises `BadInput` where it can't be loaded."""
        if self.name is None:
            assert self.seed is not None, "an origin has files or a seed"
            return drawn_model(_config(self.config), self.dtype, self.seed, device)
        options = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return load_hf_model(self.name, self.dtype, device, **options)

    def blank(self) -> Any:
        """The model without weights. Raises `BadInput` where its code is not transformers' own."""
        return blank_model(_config(self.config), DTYPES[self.dtype])

    def weights(self) -> "tuple[bool, Iterator[tuple[str, Readable]]]":
        """All weights by the model's own names, one after another, in the same order on all ranks, which ask for them
        together; and whether each rank can read them. Otherwise only rank 0 can, and the others get the names.

        Raises `BadInput` where the files are another model's, or can't be loaded.
        """
        model = self.blank()
        if self.name is None:
            assert self.seed is not None, "an origin has files or a seed"
            return True, drawn_weights(model.config, DTYPES[self.dtype], self.seed)
        first = not dist.is_initialized() or dist.get_rank() == 0
        directory = _directory(self.name, self.revision)
        seen_by_all = _same_on_all(_fingerprint(directory))
        source = stored(model)
        if seen_by_all or first:
            try:
                files = WeightFiles(model, directory)
                return seen_by_all, ((name, files[name]) for name in source)
            except NotBlocks:
                source = stored(self.whole("cpu")) if first else source
        return False, ((name, source[name].detach()) for name in source)


def origin_in(name: str | Path, dtype: Dtype, revision: str | None = None, trust_remote_code: bool = False) -> Origin:
    """The model of a directory, or of a repository of the hub. Raises `BadInput` where it has no config."""
    refuse_adapter(str(name))
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise BadInput(f"model {name} can't be loaded: {error}") from error
    return Origin(config.to_dict(), dtype, str(name), revision, trust_remote_code)


def scratch_origin(model: ScratchModel, tokenizer: Any, max_length: int, seed: int) -> Origin:
    """A model from scratch."""
    return Origin(scratch_config(model, tokenizer, max_length).to_dict(), model.dtype, seed=seed)


def _config(described: dict[str, Any]) -> Any:
    settings = dict(described)
    kind = settings.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **settings)
    except ValueError as error:
        raise BadInput(f"backend.processes: ranks can't share a model of type {kind}: {error}") from None


def _directory(name: str, revision: str | None) -> Path:
    """The directory of the files; a path that does not exist for ranks whose host has none."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    kinds = ["*.safetensors", "*.json"]
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=kinds, local_files_only=not first))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return Path(name)


def _fingerprint(directory: Path) -> int:
    """A fingerprint of the weights' files: names, sizes and some bytes of each."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as opened:
            opened.seek(max(0, size - SAMPLE_BYTES))
            digest.update(f"{file.name} {size}".encode() + opened.read(SAMPLE_BYTES))
    return int.from_bytes(digest.digest()[:7])


def _same_on_all(value: int) -> bool:
    if not dist.is_initialized():
        return True
    least, most = torch.tensor([value]), torch.tensor([value])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(least == most)
