"""Functions for SFT, DPO and GRPO in a script or a notebook, without pipeline, store or server."""
