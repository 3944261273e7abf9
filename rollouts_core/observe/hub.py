"""A policy, pushed to the Hugging Face hub with its card.

Decision: huggingface_hub does it, which skips files that are there already, so pushing again after a retry costs
nothing. The token is read only from the environment: one that an earlier login left on this machine is not used.
"""

import os
from pathlib import Path

from rollouts_core.config import ResultsConfig
from rollouts_core.errors import BadInput, StoreUnavailable

TOKEN = "HF_TOKEN"
ENDPOINT = "HF_ENDPOINT"


def check_hub(config: ResultsConfig) -> None:
    """Raises `BadInput` where a push is asked for and there is no token."""
    if config.hub and not os.environ.get(TOKEN):
        raise BadInput(f"results.hub: a push to {config.hub} needs a token in {TOKEN}, which is not set")


def push_policy(repository: str, policy: Path, card: str) -> str:
    """Make the repository, private, unless it is there, and push the directory with its card. Returns the address.

    Raises `BadInput` when the hub refuses, `StoreUnavailable` when it does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    (policy / "README.md").write_text(card)
    hub = HfApi(endpoint=os.environ.get(ENDPOINT), token=os.environ[TOKEN])
    try:
        address = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=policy, commit_message="A policy of rollouts")
    except HFValidationError as error:
        raise BadInput(f"results.hub: {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = f"results.hub: the hub refuses {repository} with status {status}: {error.server_message or error}"
        if status >= 500 or status == 429:
            raise StoreUnavailable(said) from None
        raise BadInput(f"{said}. Check that the token in {TOKEN} may write there") from None
    except Exception as error:  # whichever HTTP library is below
        raise StoreUnavailable(f"results.hub: the hub does not answer: {type(error).__name__}: {error}") from error
    return str(address)
