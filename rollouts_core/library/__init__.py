"""One call for SFT, DPO and GRPO, from a script or a notebook, without pipeline, store or server."""
