"""A model directory out of a GGUF file, for models that can be had in no other form.

What the quantisation took away stays away: the weights are the file's, written out in float32. It needs the package
`gguf`.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from rollouts_core.errors import BadInput


def unpack_gguf(file: Path, cache: Path) -> Path:
    """The model directory of a GGUF file, below `cache`; made once for each content, by whoever asks first.

    Raises `BadInput` when the file is not there, `gguf` is not installed, or transformers does not know the model.
    """
    if not file.is_file():
        raise BadInput(f"no such file: {file}")
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    place = cache / f"{file.stem}-{digest[:12]}"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.stem}-", dir=cache) as scratch:
        made = Path(scratch) / "model"
        _unpack(file, made)
        try:
            made.rename(place)
        except OSError:  # another process was first
            shutil.rmtree(made)
    return place


def _unpack(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise BadInput(f"{file}: reading GGUF needs the package gguf: pip install gguf ({error})") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} can't be read: {error}") from error
    config = read.config
    del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
