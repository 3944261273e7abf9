"""Makes a model directory from a GGUF file, for models that are available in no other form.

    python -m rollouts_core.training.gguf FILE PARENT       makes PARENT/<the file's name without .gguf>

Precision that the quantisation lost stays lost: the weights are those of the file, written in float32. It needs the
package `gguf`.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from rollouts_core.errors import BadInput


def unpack_gguf(file: Path, parent: Path) -> Path:
    """The model directory of a GGUF file, below `parent`; one that is there is left as it is.

    Raises `BadInput` when the file is not there, `gguf` is not installed, or transformers does not know the model.
    """
    if not file.is_file():
        raise BadInput(f"no such file: {file}")
    place = parent / file.stem
    if place.is_dir():
        return place
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.stem}-", dir=parent) as scratch:
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
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    print(unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2])))
