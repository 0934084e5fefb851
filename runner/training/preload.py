"""Imported once by the fork server: everything slow that a rank needs, and nothing that starts CUDA or a thread."""

import datasets  # noqa: F401
import trl.trainer.sft_trainer  # noqa: F401

import runner.training.job  # noqa: F401
